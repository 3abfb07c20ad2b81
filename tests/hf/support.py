"""Runs to export, our logits beside those of transformers, and codecs of third parties."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from runs import train
from thinwire import checkpoint
from thinwire.cli import main as cli
from thinwire.codecs.base import CastEntry, Codec
from thinwire.config.toml import CONFIG_FILE, read_config
from thinwire.model.ends import Context
from thinwire.model.stream import Stream
from thinwire.pipeline.by_stage import leave_ends_out
from thinwire.pipeline.inprocess import Pipeline, build_pipeline

WORDS = ("--train.steps", "3", "--train.validate_every", "0")


def train_run(config: str, run: Path, *words: str) -> Path:
    """Train a tiny run for a few steps."""
    train(config, run, *WORDS, *words)
    return run


def export(run: Path, out: Path, *words: str) -> Path:
    """Run `thinwire export` without measuring losses."""
    assert cli.main(["export", str(run), str(out), "--sequences", "0", *words]) == 0
    return out


def bring_in(config: str, folder: Path, run: Path, *words: str) -> Path:
    """Run `thinwire import`."""
    assert cli.main(["import", str(folder), "--run", str(run), "--config", config, *WORDS, *words]) == 0
    return run


def load_pipeline(run: Path) -> Pipeline:
    """Build a run's pipeline and load its newest checkpoint."""
    pipeline = build_pipeline(read_config(run / CONFIG_FILE), torch.device("cpu"))
    checkpoint.load_stages(checkpoint.newest(run, len(pipeline.stages)), pipeline.stages, None, {})
    return pipeline


def our_logits(run: Path, ids_BT: Tensor, *, boundaries: bool = False) -> Tensor:
    """Run a run's stages one behind another, without boundaries or through them."""
    pipeline = load_pipeline(run)
    seen: list[Tensor] = []
    pipeline.stages[-1].head.register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    for stage in pipeline.stages:
        if not boundaries:
            leave_ends_out(stage, pipeline.codec.compute)
    ids_BT1 = torch.cat((ids_BT, ids_BT[:, :1]), dim=1)
    with torch.no_grad():
        if boundaries:
            pipeline.evaluate(ids_BT1)
        else:
            payload: tuple[Tensor, ...] = ()
            for stage in pipeline.stages:
                payload = stage(ids_BT1, payload, Context(0, torch.arange(len(ids_BT1)), training=False))
    return torch.cat(seen)


def their_logits(folder: Path, ids_BT: Tensor) -> Tensor:
    """Load a folder with transformers in fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(ids_BT).logits


def some_ids(count: int = 4, vocabulary: int = 260, time: int = 16) -> Tensor:
    return torch.randint(0, vocabulary, (count, time), generator=torch.Generator().manual_seed(5))


def same_bytes(first: Path, second: Path, *but: str) -> None:
    """Compare two folders file by file."""
    names = {path.name for path in first.iterdir()} | {path.name for path in second.iterdir()}
    for name in sorted(names - set(but)):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


class GainedEntry(CastEntry):
    """Multiply what arrives by a learned number."""

    def __init__(self, compute: torch.dtype) -> None:
        super().__init__(compute)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, payload, ids_BT, context):
        return super().forward(payload, ids_BT, context) * self.gain


class Gained(Codec):
    """A third party's codec whose boundary learns."""

    def ends(self, plan):
        entry, exit = super().ends(plan)
        return None if entry is None else GainedEntry(self.compute), exit


class OtherStream(Stream):
    def read(self, stream, static):
        return 2 * stream


class Other(Codec):
    """A third party's codec whose blocks read the stream in another way."""

    def stream(self, plan):
        return OtherStream()


class Counting(Codec):
    """A third party's codec that keeps a state which is not of the network."""

    def ends(self, plan):
        entry, exit = super().ends(plan)
        if exit is not None:
            exit.register_buffer("seen", torch.zeros(()))
        return entry, exit


def plug_in(monkeypatch) -> None:
    """Make the codecs above known by name."""
    from thinwire.config.registry import CODECS

    for kind in (Gained, Other, Counting):
        monkeypatch.setitem(CODECS.registered, kind.__name__.lower(), (kind, "for tests"))
