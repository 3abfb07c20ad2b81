"""Write text with a run's newest checkpoint: `thinwire generate runs/first --prompt "def main("`.

In one process, or through one worker per stage with keys and values kept in each (`--pipeline.mode workers`): the same seed gives the
same text. Across machines every member of the roster calls it with --roster and its --stage; stage 0 has the prompt and prints the text.
Standard output carries the text alone.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from thinwire.cluster.generate import write_among, write_in_workers
from thinwire.cluster.membership import Membership
from thinwire.cluster.places import read_places
from thinwire.config.mistakes import refuse_expanded
from thinwire.config.sections import Device, RunConfig
from thinwire.link.identity import load_identity
from thinwire.link.roster import read_roster
from thinwire.pipeline.meter import Meter
from thinwire.run.generate import Order, Text, longer_than_trained, read_prompt, refuse_whole_sequences, write_here
from thinwire.run.sampling import Sampling
from thinwire.run.saved import Mode, for_use, read_settings, read_tokenizer


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


def main(argv: list[str]) -> None:
    """Run the `generate` verb."""
    refuse_expanded(argv, ("prompt",), positional=int(bool(argv) and argv[0].startswith("--")))
    command = tyro.cli(GenerateCommand, prog="thinwire generate", args=argv, use_underscores=True)
    config = settings_for(command)
    if command.roster is not None and command.stage > 0:
        write_among(membership_of(command, config), command.run, None, None, lambda token: None)
        return
    tokenizer = read_tokenizer(command.run, command.tokenizer)
    prompt, order = read_prompt(command.prompt, command.max_new_tokens, command.sampling, tokenizer, config)
    if note := longer_than_trained(order, config):
        print(f"thinwire: note: {note}", file=sys.stderr)
    text = Text(tokenizer, prompt, partial(print, end="", flush=True))
    meters = write_text(command, config, prompt, order, text)
    text.finish()
    print(flush=True)
    print(f"thinwire: {text.describe(meters)}", file=sys.stderr)


def settings_for(command: GenerateCommand) -> RunConfig:
    """Return the run's settings with what this command chooses for itself, checked."""
    mode: Mode = "workers" if command.roster else command.mode
    config = for_use(read_settings(command.run), mode, command.profile, command.device)
    refuse_whole_sequences(config, command.run)
    return config


def write_text(command: GenerateCommand, config: RunConfig, prompt: list[int], order: Order, text: Text) -> list[Meter]:
    """Write the text; return what crossed each boundary that was seen from here."""
    if command.roster is not None:
        return write_among(membership_of(command, config), command.run, prompt, order, text.add)
    how = write_in_workers if command.mode == "workers" else write_here
    return how(config, command.run, prompt, order, text.add)


def membership_of(command: GenerateCommand, config: RunConfig) -> Membership:
    """Return this machine's membership of the roster."""
    assert command.roster is not None
    return Membership(
        config=config,
        places=read_places(read_roster(command.roster), command.run),
        identity=load_identity(command.keys),
        stage=command.stage,
        listen=command.listen,
    )
