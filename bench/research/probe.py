"""Train `small` in 4 stages with a prototype of entropy-coded anchored boundaries and keep the row in bench/results/research.

    python bench/research/probe.py NAME --steps 200 --seed 0 --forward bits=50,mean=token --backward bits=30 -- --codec.rank 32 ...

Code lengths are those of an ideal adaptive coder (leg.py); ids are not counted (every stage reads the data).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

import torch
from leg import Leg, LegOptions
from torch import Tensor, nn

import thinwire
from thinwire.codecs.anchored import Anchored, AnchoredOptions
from thinwire.run.command import parse_train
from thinwire.run.here import train_here
from thinwire.run.trainer import Trainer

RESULTS = Path(__file__).parents[1] / "results" / "research"
PLAIN = LegOptions()


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, ids_BT, training, leg):
        decoded = leg.code(values, ids_BT, training)
        for shadow in leg.shadows if training else ():
            shadow.code(values, ids_BT)
        ctx.leg, ctx.penalty = leg, None
        if training and leg.penalty:
            # of log2(1 + 4 r^2) / 2 bits per value, for a mean over the 2048 tokens of a step
            ctx.penalty = leg.penalty / 2048 * leg.slope
        return decoded

    @staticmethod
    def backward(ctx, gradient):
        return gradient if ctx.penalty is None else gradient + ctx.penalty, None, None, None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, ids_BT, training, leg):
        ctx.leg, ctx.ids_BT, ctx.training = leg, ids_BT, training
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.leg.code(gradient, ctx.ids_BT), None, None, None


class End(nn.Module):
    def __init__(self, inner: nn.Module, leg: Leg, sends: bool) -> None:
        super().__init__()
        self.inner, self.leg, self.sends = inner, leg, sends

    def forward(self, value, ids_BT: Tensor, context):
        if self.sends:
            (narrow,) = self.inner(value, ids_BT, context)
            return (_Send.apply(narrow, ids_BT, context.training, self.leg),)
        return self.inner((_Receive.apply(value[0], ids_BT, context.training, self.leg),), ids_BT, context)


@dataclass(frozen=True, kw_only=True)
class ProbeOptions(AnchoredOptions):
    """Those of the anchored boundary."""


class Probe(Anchored):
    Options = ProbeOptions
    forward_options: ClassVar[dict[int, LegOptions]] = {}
    backward_options: ClassVar[dict[int, LegOptions]] = {}
    legs: ClassVar[dict[str, Leg]] = {}
    shadows: ClassVar[dict[str, Leg]] = {}
    """Further ways to code what is sent forward at layer 4, measured alone."""
    shadow_options: ClassVar[dict[str, LegOptions]] = {}
    exact_loss: float | None = None

    def __init__(self, *positional, **named) -> None:
        super().__init__(*positional, **named)
        self.wire_dtype = self.compute

    def leg(self, layer: int, direction: str) -> Leg:
        options = (self.forward_options if direction == "forward" else self.backward_options)[layer]
        made = Leg(options, self.options.rank, self.model.vocabulary, self.seed * 1000 + layer)
        if layer == 4 and direction == "forward":
            for text, each in self.shadow_options.items():
                made.shadows.append(self.shadows.setdefault(text, Leg(each, self.options.rank, self.model.vocabulary, 1)))
        return self.legs.setdefault(f"{direction}-{layer}", made)

    def ends(self, plan):
        entry, exit = super().ends(plan)
        if entry is not None:
            entry = End(entry, self.leg(plan.layers.start, "backward"), False)
        if exit is not None:
            exit = End(exit, self.leg(plan.layers.stop, "forward"), True)
        return entry, exit


def read_options(text: str) -> LegOptions:
    kinds = {field.name: str(field.type) for field in fields(LegOptions)}
    chosen = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")  # "," alone: all defaults
        kind = kinds[name]
        chosen[name] = value == "true" if kind == "bool" else value if kind == "str" else float(value)
    return LegOptions(**chosen)


def by_boundary(texts: list[str]) -> dict[int, LegOptions]:
    options = [read_options(text) for text in texts]
    return dict(zip((2, 4, 6), options * (3 if len(options) == 1 else 1), strict=True))


class Log:
    """Print the legs' state now and then."""

    def __init__(self) -> None:
        self.started = time.time()

    def log(self, step, values) -> None:
        if "val_loss" in values or step % 25 == 0:
            shown = {name: {key: round(value, 4) for key, value in leg.last.items()} for name, leg in Probe.legs.items()}
            print(step, f"{time.time() - self.started:.0f}s", values.get("loss"), values.get("val_loss"), flush=True)
            print("   ", json.dumps(shown), flush=True)
            for text, leg in Probe.shadows.items():
                print("  shadow", text, {key: round(value, 4) for key, value in leg.last.items()}, flush=True)

    def close(self) -> None:
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def validate_exact(trainer: Trainer) -> float:
    """Return the validation loss; at the end also keep what it would be without forward quantisation."""
    loss = plain_validate(trainer)
    if trainer.position.step >= trainer.config.train.steps:
        for leg in Probe.legs.values():
            leg.exact = True
        Probe.exact_loss = plain_validate(trainer)
        for leg in Probe.legs.values():
            leg.exact = False
    return loss


plain_validate = Trainer.validate
Trainer.validate = validate_exact


def main() -> None:
    own, _, more = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--forward", nargs="*", default=[""])
    parser.add_argument("--backward", nargs="*", default=[""])
    parser.add_argument("--shadow", nargs="*", default=[])
    arguments = parser.parse_args(own.split())
    Probe.shadow_options = {text: read_options(text) for text in arguments.shadow}
    thinwire.register_codec("probe", Probe)
    messages = f",messages={2 * arguments.steps}"
    arguments.forward, arguments.backward = ([text + messages for text in texts] for texts in (arguments.forward, arguments.backward))
    Probe.forward_options, Probe.backward_options = by_boundary(arguments.forward), by_boundary(arguments.backward)
    words = shlex.split("--config small --pipeline.stages 4 --train.validate_every 50 --pipeline.microbatches 2 --train.threads 1")
    words += ["--codec.name", "probe", "--train.steps", str(arguments.steps), "--seed", str(arguments.seed), *more.split()]
    words += ["--codec.anchors", "factorised", "--train.checkpoint_every", "0"]
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="thinwire-probe-") as folder:
        config = parse_train([*words, "--run", str(Path(folder) / "run")]).config
        summary = train_here(config, Path(folder) / "run", trackers=[Log()])
        lines = [json.loads(line) for line in (Path(folder) / "run/metrics/stage-all.jsonl").read_text().splitlines()]
    curve = {line["step"]: line["val_loss"] for line in lines if "val_loss" in line} | {summary["steps"]: summary.get("val_loss")}
    sent = {name: leg.bits / 8 / leg.tokens for name, leg in Probe.legs.items() if leg.tokens}
    row = {
        "name": arguments.name,
        "steps": arguments.steps,
        "seed": arguments.seed,
        "forward": arguments.forward,
        "backward": arguments.backward,
        "more": more,
        "val_loss": summary.get("val_loss"),
        "steps_done": summary.get("steps"),
        "trainable_parameters": summary.get("trainable_parameters"),
        "val_loss_exact_forward": Probe.exact_loss,
        "bytes_per_token": sent,
        "bytes_per_token_both": sum(sent.values()) / 3,
        "curve": curve,
        "seconds": time.time() - started,
        "shadows": {text: leg.last for text, leg in Probe.shadows.items()},
        "last": {name: leg.last for name, leg in Probe.legs.items()},
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{arguments.name}-{arguments.steps}-{arguments.seed}.json").write_text(json.dumps(row, indent=1))
    print(arguments.name, "val", summary["val_loss"], "bytes", row["bytes_per_token_both"], "seconds", row["seconds"])


if __name__ == "__main__":
    main()
