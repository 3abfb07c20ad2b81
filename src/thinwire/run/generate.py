"""Write text with a run's newest checkpoint: `thinwire generate runs/first --prompt "def main("`.

In one process, or through one worker per stage with keys and values kept in each (`--pipeline.mode workers`): the same seed gives the
same text. Across machines every member of the roster calls it with --roster and its --stage; stage 0 has the prompt and prints the text.
Standard output carries the text alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from thinwire.cluster.membership import Membership
from thinwire.cluster.places import known_places
from thinwire.cluster.supervisor import Say, run_workers
from thinwire.config.mistakes import refuse_expanded
from thinwire.config.sections import Device, RunConfig
from thinwire.data.tokenize import end_token
from thinwire.link.errors import LinkError
from thinwire.link.identity import load_identity
from thinwire.link.roster import read_roster
from thinwire.model.cut import cut_layers
from thinwire.model.stage import build_stage
from thinwire.pipeline import forms
from thinwire.pipeline.control import Control
from thinwire.pipeline.decode import Reader, WorkerWriter, Writer, writing_contract
from thinwire.pipeline.device import choose_device
from thinwire.pipeline.inprocess import build_codec, build_pipeline
from thinwire.pipeline.meter import Meter, Traffic
from thinwire.run.sampling import Sampler, Sampling
from thinwire.run.saved import Mode, for_use, load_here, load_together, read_settings, read_tokenizer
from thinwire.run.stop import Stop

CONTEXT_TOKENS = 8
"""Tokens of the prompt that decide how the first new ones are written."""


@dataclass(frozen=True, kw_only=True)
class GenerateCommand:
    """Write text with a run's newest checkpoint."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder that `thinwire train` wrote."""
    prompt: str = ""
    """Text to go on with; empty: the beginning of a document."""
    max_new_tokens: int = 128
    """Most tokens to write; the end of a document ends the text earlier."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(default_factory=Sampling)
    tokenizer: Annotated[str | None, tyro.conf.arg(name="data.tokenizer")] = None
    """Another tokenizer than the run's own: a `tokenizer.json`, or hf:NAME."""
    mode: Annotated[Mode, tyro.conf.arg(name="pipeline.mode")] = "inprocess"
    """All stages in this process, or one worker process per stage."""
    profile: Annotated[str, tyro.conf.arg(name="link.profile")] = "open"
    """Link profile to emulate between workers."""
    device: Device = "auto"
    """Where to compute."""
    roster: Path | None = None
    """Roster of a run whose stages are on several machines."""
    stage: int = 0
    """With --roster: the stage that this machine has."""
    keys: Path = Path("keys")
    """With --roster: folder that `thinwire keys` made here."""
    listen: str | None = None
    """With --roster: address to listen on if it is not the roster's."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What stage 0 tells the others about the text to write."""

    length: int
    """Tokens of the prompt."""
    limit: int
    end: int | None
    sampling: Sampling

    @classmethod
    def of(cls, message: dict[str, Any]) -> Order:
        return cls(**message | {"sampling": Sampling(**message["sampling"])})


def main(argv: list[str]) -> None:
    """Run the `generate` verb."""
    refuse_expanded(argv, ("prompt",), positional=int(bool(argv) and argv[0].startswith("--")))
    command = tyro.cli(GenerateCommand, prog="thinwire generate", args=argv, use_underscores=True)
    config = settings(command)
    if command.roster is not None and command.stage > 0:
        with membership(command, config) as member:
            write_stage(member, command.run)
        return
    tokenizer = read_tokenizer(command.run, command.tokenizer)
    prompt, order = read_prompt(command, tokenizer, config)
    text = Text(tokenizer, prompt)
    text.close(run(command, config, prompt, order, text))


def settings(command: GenerateCommand) -> RunConfig:
    """Return the run's settings with what this command chooses for itself, checked."""
    if command.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {command.max_new_tokens}; choose 1 or more")
    mode: Mode = "workers" if command.roster else command.mode
    config = for_use(read_settings(command.run), mode, command.profile, command.device)
    if config.pipeline.stages > 1 and not build_codec(config).by_token:
        raise ValueError(
            f"the codec {config.codec.name!r} looks at a whole sequence at once, so text cannot be written token by token through it; "
            f"export the plain network and let transformers write: thinwire export {command.run} OUT"
        )
    return config


def read_prompt(command: GenerateCommand, tokenizer: Tokenizer, config: RunConfig) -> tuple[list[int], Order]:
    """Turn the prompt into tokens; an empty one is the end of the document before."""
    end = end_token(tokenizer)
    prompt = tokenizer.encode(command.prompt, add_special_tokens=False).ids
    if not prompt:
        if end is None:
            raise ValueError("the prompt is empty and the tokenizer has no token for the end of a document; give --prompt TEXT")
        prompt = [end]
    if (total := len(prompt) + command.max_new_tokens) > config.model.context:
        print(
            f"thinwire: note: prompt and new tokens are up to {total} tokens, the model was trained on {config.model.context}; "
            "beyond them the text gets worse",
            file=sys.stderr,
        )
    return prompt, Order(length=len(prompt), limit=command.max_new_tokens, end=end, sampling=command.sampling)


def run(command: GenerateCommand, config: RunConfig, prompt: list[int], order: Order, text: Text) -> list[Meter]:
    """Write the text; return what crossed each boundary that was seen from here."""
    if command.roster is not None:
        with membership(command, config) as member:
            return write_stage(member, command.run, prompt, order, text.add)
    if command.mode == "workers":
        arguments = {"run": str(command.run), "prompt": prompt, "order": asdict(order)}
        stages = run_workers(write, config, arguments, lambda worker_id, message: text.add(message["token"]), graceful=False)
        return [Meter(**meter) for stage in stages for meter in stage["meters"]]
    pipeline = build_pipeline(config, choose_device(config.device))
    torch.set_num_threads(config.train.threads or torch.get_num_threads())
    writer = Writer(pipeline.stages, pipeline.codec, load_here(command.run, pipeline.stages), config.train.dtype)
    for token in writer.write(prompt, order.limit, order.end, Sampler(order.sampling)):
        text.add(token)
    return writer.meters


class Text:
    """Print tokens as text while they come, and in the end a line about speed and bytes to standard error."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        self.tokenizer = tokenizer
        self.stream = DecodeStream(skip_special_tokens=True)
        # Some tokenizers write a token differently at the beginning of a text.
        self.before = prompt[-CONTEXT_TOKENS:]
        self.seen = sum(len(self.stream.step(tokenizer, token) or "") for token in self.before)
        """Characters that are not to be printed, or were."""
        self.tokens: list[int] = []
        self.times: list[float] = []

    def add(self, token: int) -> None:
        """Print what a token completes."""
        self.tokens.append(token)
        self.times.append(time.perf_counter())
        if piece := self.stream.step(self.tokenizer, token):
            self.seen += len(piece)
            print(piece, end="", flush=True)

    def close(self, meters: list[Meter]) -> None:
        """Print what is left, a character whose last bytes were not written, and the figures."""
        print(self.tokenizer.decode([*self.before, *self.tokens])[self.seen :], flush=True)
        traffic, figures = Traffic(meters), [f"{len(self.tokens)} tokens"]
        if len(self.tokens) > 1:
            figures.append(f"{(len(self.tokens) - 1) / (self.times[-1] - self.times[0]):.1f} tokens/s after the first")
        if traffic.per_token("forward"):
            size = traffic.per_token("forward") + traffic.per_token("backward")
            figures.append(f"{size:.1f} bytes per new token and boundary")
        print(f"thinwire: {', '.join(figures)}", file=sys.stderr)


@contextmanager
def membership(command: GenerateCommand, config: RunConfig) -> Iterator[Membership]:
    """Return this machine's membership; a lost link becomes an error for the user."""
    assert command.roster is not None
    member = Membership(
        config=config,
        roster=known_places(read_roster(command.roster), command.run),
        identity=load_identity(command.keys),
        stage=command.stage,
        listen=command.listen,
    )
    try:
        yield member
    except LinkError as error:
        raise ValueError(str(error)) from error


def write(member: Membership, say: Say, stop: Stop, run: str, prompt: list[int], order: dict[str, Any]) -> dict[str, Any]:
    """Be the worker of a stage; stage 0 tells the supervisor of every token."""
    if member.stage == 0:
        meters = write_stage(member, Path(run), prompt, Order.of(order), lambda token: say({"token": token}))
    else:
        meters = write_stage(member, Path(run))
    return {"meters": [asdict(meter) for meter in meters]}


def write_stage(
    member: Membership,
    run: Path,
    prompt: list[int] | None = None,
    order: Order | None = None,
    heard: Callable[[int], None] = lambda token: None,
) -> list[Meter]:
    """Do one stage's part of writing; prompt and order are stage 0's to give. Return what crossed the boundary behind the stage."""
    config = member.config
    torch.set_num_threads(config.train.threads or torch.get_num_threads())
    codec = build_codec(config)
    ranges = cut_layers(config.model.layers, config.pipeline.stages, config.pipeline.split)
    layers = ranges[member.stage]
    stage = build_stage(config.model, ranges, member.stage, codec, config.seed).to(choose_device(config.device))
    neighbours = member.neighbours("generate")
    try:
        cuts = {-1: layers.start, 1: layers.stop}
        links = neighbours.open(
            config,
            {
                place: writing_contract(codec.at(cuts[side]), downstream=side > 0)
                for side, place in neighbours.worker_id.sides(len(ranges)).items()
            },
        )
        control = Control(links.left, links.right)
        step = load_together(run, stage, control)
        order = Order.of(control.announce(asdict(order) if order else None, forms.ORDER))
        writer = WorkerWriter(Reader(stage, step, config.train.dtype), codec, links.left, links.right)
        for token in writer.write(prompt, order.length, order.limit, order.end, Sampler(order.sampling)):
            heard(token)
        return writer.meters
    finally:
        neighbours.close()
