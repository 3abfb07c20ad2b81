"""What a comparison is asked to do: its SPECs, each a line of text that says which method, with which options, takes part. No torch here.

NAME[:OPTION=VALUE,...]   anchored:rank=32,bits=4      subspace:rank=16,model.ffn=900      --exchange local:steps=20,replicas.graph=ring
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.config.options import split_spec

if TYPE_CHECKING:
    from thinwire.board.subjects import Subject

LINKS = ("dsl_2mbps", "home_80mbps")
SKIPPED_STEPS = 2
"""First steps of a speed measurement that are not counted: they also pay for start-up."""
OURS = {
    "seed": "use --seeds",
    "train.steps": "use --steps",
    "train.seconds": "every row runs all its steps: use --steps",
    "pipeline.mode": "learning rows of codecs run in one process, all others in workers",
    "link.profile": "use --links",
    "run": "runs go to the folder `runs` of --out",
    "resume": "a comparison goes on by itself: give the same command again",
}
"""Options of `thinwire train` that the comparison decides, and what to do instead."""


@dataclass(frozen=True)
class Spec:
    """A method with its options, and settings that differ for it alone."""

    text: str
    method: str
    """Name of the codec or exchange."""
    options: tuple[tuple[str, Any], ...] = ()
    """Options of the method."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Settings by their dotted name, such as `model.ffn`."""
    heading: str | None = None
    """Group of the table."""

    @property
    def slug(self) -> str:
        """Name the spec so that a file can bear it: anchored-rank32-bits4."""
        parts = [part.replace("=", "", 1) for part in re.split("[:,]", self.text)]
        return re.sub(r"[^\w.-]+", "_", "-".join(parts))


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a comparison was asked to do."""

    subject: Subject
    specs: tuple[Spec, ...]
    """Empty: every codec of the registry."""
    config: str
    options: tuple[str, ...] = ()
    """Options of `thinwire train` for all specs."""
    links: tuple[str, ...] = LINKS
    steps: int | None = None
    seeds: tuple[int, ...] = ()
    """Empty: the config's."""
    target: float | None = None
    name: str = "screen"
    out: Path
    end_to_end: bool = False
    speed_steps: int = 8
    repeats: int = 1
    redraw: bool = False
    line: str = ""
    """The command that draws the same board again."""

    def __post_init__(self) -> None:
        if not self.line:
            object.__setattr__(self, "line", self.command())

    def command(self) -> str:
        """Write the command that draws the board of this request."""
        texts = [spec.text for spec in self.specs]
        words = ["thinwire", "compare", *self.subject.introduced_by, *(texts or ["--all"])]
        words += ["--config", self.config, "--links", *self.links]
        words += ["--steps", str(self.steps)] if self.steps else []
        words += ["--seeds", *map(str, self.seeds)] if self.seeds else []
        words += ["--target", str(self.target)] if self.target else []
        words += ["--end-to-end"] if self.end_to_end else []
        return shlex.join([*words, "--name", self.name, "--out", str(self.out), *self.options, "--redraw"])


def parse_spec(text: str, subject: Subject, heading: str | None = None) -> Spec:
    """Read one SPEC: names without a dot are options of the method, those with one are settings."""
    method, found = split_spec(text, subject.noun, subject.form)
    options = tuple((name, value) for name, value in found.items() if "." not in name)
    return Spec(text, method, options, tuple((name, value) for name, value in found.items() if "." in name), heading)


def parse_specs(arguments: Iterable[str], subject: Subject) -> tuple[Spec, ...]:
    """Read SPECs and @FILEs in their order; a spec that was given before is refused."""
    specs: list[Spec] = []
    for argument in arguments:
        specs += read_specs(Path(argument[1:]), subject) if argument.startswith("@") else [parse_spec(argument, subject)]
    seen: dict[str, Spec] = {}
    for spec in specs:
        if spec.slug in seen:
            raise ValueError(f"the spec {spec.text!r} is given twice (as {seen[spec.slug].text!r}); leave one out")
        seen[spec.slug] = spec
    return tuple(specs)


def read_specs(path: Path, subject: Subject) -> list[Spec]:
    """Read a file of SPECs, one per line; `# text` is the heading of what follows."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; @FILE names a text file with one SPEC per line") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text; save it as UTF-8") from None
    specs: list[Spec] = []
    heading = None
    for line in filter(None, map(str.strip, lines)):
        if line.startswith("#"):
            heading = line.lstrip("#").strip() or None
        else:
            specs.append(parse_spec(line, subject, heading))
    if not specs:
        raise ValueError(f"{path} holds no spec; write one per line: {subject.form}")
    return specs
