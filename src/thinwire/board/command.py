"""Judge methods by the time they take to a loss over links: the words of `thinwire compare`. No torch here.

    thinwire compare SPEC [SPEC ...] | @FILE ... | --all [--config small] [--links dsl_2mbps home_80mbps] [--steps N] [--seeds 0 1 2]
                     [--target LOSS] [--name screen] [--out out/board] [--end-to-end] [--redraw] [any word of `thinwire train`]
    thinwire compare --exchange METHOD [METHOD ...] --replicas.count 2 [the same words; --out out/exchanges]

A SPEC is `NAME[:WORD=VALUE,...]` (`spec.py`): a boundary method, or behind --exchange a way in which replicas learn from each other.
What is measured and how it is scored: `learn.py`, `exchanges.py`, `speed.py`, `whole.py`, `score.py`.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from thinwire.board.spec import EXCHANGE_FORM, FORM, Spec, parse_exchange, parse_specs
from thinwire.board.subject import CODECS, EXCHANGES, Subject
from thinwire.config.profiles import find_profile
from thinwire.config.toml import near
from thinwire.run.settings import scan

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
"""Words of `thinwire train` that the comparison decides, and what to do instead."""


@dataclass(frozen=True, kw_only=True)
class CompareCommand:
    """What `thinwire compare` was asked to do."""

    subject: Subject
    specs: tuple[Spec, ...]
    """Empty: every codec of the registry."""
    config: str
    words: tuple[str, ...]
    """Words of `thinwire train` for all specs."""
    links: tuple[str, ...]
    steps: int | None
    seeds: tuple[int, ...]
    """Empty: the config's."""
    target: float | None
    name: str
    out: Path
    end_to_end: bool
    speed_steps: int
    repeats: int
    redraw: bool
    line: str
    """The command that draws the same board again."""


class Words(argparse.ArgumentParser):
    """Parse words; what is wrong with them is a ValueError, as everywhere."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; SPECs come first, thinwire compare --help lists the words")


def loss(text: str) -> float:
    """Read a loss."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no loss; give a number above 0, such as 4.2, or leave it out")
    return value


def count(least: int):
    """Return a reader of whole numbers from a limit on."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}; give one")
        return int(text)

    return read


def parser() -> tuple[Words, set[str]]:
    """Make the parser of the verb's own words; return it and those words."""
    own = Words(prog="thinwire compare", allow_abbrev=False, description="Judge methods by time to loss over links.")
    own.epilog = "Any word of `thinwire train` can follow and goes for all specs, such as --pipeline.stages 4 --train.validate_every 50."
    own.add_argument("specs", nargs="*", metavar="SPEC", help=f"boundary method: {FORM}; @FILE: one per line, `# text` is a heading")
    replicas = f"ways in which replicas learn from each other, instead of SPECs: {EXCHANGE_FORM}, or @FILE; needs --replicas.count"
    listed = f"link profiles (default: {' '.join(LINKS)}); none: no speed"
    table: dict[str, dict[str, Any]] = {
        "--all": {"action": "store_true", "help": "every codec of the registry with its defaults"},
        "--exchange": {"nargs": "+", "default": (), "metavar": "METHOD", "help": replicas},
        "--config": {"default": "small", "help": "packaged config, or a file that ends in .toml (default: small)"},
        "--links": {"nargs": "*", "default": LINKS, "metavar": "LINK", "help": listed},
        "--steps": {"type": count(1), "metavar": "N", "help": "steps of a learning row (default: the config's)"},
        "--seeds": {"type": count(0), "nargs": "+", "default": (), "metavar": "SEED", "help": "seeds (default: the config's)"},
        "--target": {
            "type": loss,
            "metavar": "LOSS",
            "help": "loss to reach (default: that of dense or allreduce after half of the steps)",
        },
        "--name": {"default": "screen", "help": "name of the board; a number in front sorts it (default: screen)"},
        "--out": {"type": Path, "help": f"where it all goes, runs too (default: {CODECS.out}, with --exchange {EXCHANGES.out})"},
        "--end-to-end": {"action": "store_true", "help": "also train over each link, to check the estimated times"},
        "--speed-steps": {"type": count(SKIPPED_STEPS + 1), "default": 8, "metavar": "N", "help": "steps of a speed row (default: 8)"},
        "--repeats": {"type": count(1), "default": 1, "metavar": "N", "help": "speed measurements of a row; the median counts"},
        "--redraw": {"action": "store_true", "help": "only draw what the finished rows say"},
    }
    for word, form in table.items():
        own.add_argument(word, **form)
    return own, {*table, "--help"}


def split(argv: list[str], known: set[str]) -> tuple[list[str], list[str]]:
    """Tell the verb's own words, and what follows them, from those of `thinwire train`."""
    mine: list[str] = []
    theirs: list[str] = []
    into = mine
    for token in argv:
        if token.startswith("--"):
            name, equals, value = token.partition("=")
            dashed = name.replace("_", "-")
            into = mine if dashed in known else theirs
            token = dashed + equals + value if dashed in known else token
        into.append(token)
    return mine, theirs


def parse_compare(argv: list[str]) -> CompareCommand:
    """Read the words of `thinwire compare` into a command; what needs torch to be checked is `cases.py`'s."""
    own, known = parser()
    mine, theirs = split(argv, known)
    given = own.parse_args(mine)
    subject = EXCHANGES if given.exchange else CODECS
    refuse_words(theirs, known, subject)
    specs = specs_of(given)
    out = given.out or subject.out
    for name in ("links", "seeds"):
        values = getattr(given, name)
        if len(set(values)) < len(values):
            raise ValueError(f"--{name} {' '.join(map(str, values))} names one twice; leave it out")
    for link in given.links:
        find_profile(link)
    if not re.fullmatch(r"\w[\w.-]*", given.name) or given.name == "discussion":
        raise ValueError(
            f"--name is {given.name!r}; use letters, digits, - and _, and not `discussion`, which is the text above all boards"
        )
    line = shlex.join(["thinwire", "compare", *(token for token in [*mine, *theirs] if token != "--redraw"), "--redraw"])
    values = {name: value for name, value in vars(given).items() if name not in ("all", "exchange")}
    if out.resolve() == Path.cwd().resolve():
        raise ValueError(f"--out is {out}, the current folder; name one below it, such as {subject.out}")
    values |= {"specs": specs, "links": tuple(given.links), "seeds": tuple(given.seeds), "out": out}
    return CompareCommand(**values, subject=subject, words=tuple(theirs), line=line)


def specs_of(given: argparse.Namespace) -> tuple[Spec, ...]:
    """Read what is to be compared; none: every codec."""
    if given.exchange and (given.specs or given.all):
        other = "--all" if given.all else f"the SPEC {given.specs[0]}"
        raise ValueError(f"both {other} and --exchange are given; compare boundary methods or exchanges: leave one of them out")
    if given.exchange:
        return tuple(parse_specs(given.exchange, parse_exchange))
    if given.all == bool(given.specs):
        raise ValueError(f"{'both SPECs and --all are given' if given.all else 'nothing to compare'}; give SPECs ({FORM}), @FILE, or --all")
    return tuple(parse_specs(given.specs))


def refuse_words(words: list[str], own: set[str], subject: Subject) -> None:
    """Refuse words of `thinwire train` that the comparison decides, and words of nobody."""
    for word in scan(words):
        if word in OURS:
            raise ValueError(f"--{word} is not for thinwire compare; {OURS[word]}")
        if word == "replicas.exchange" and subject is EXCHANGES:
            raise ValueError("--replicas.exchange is not for thinwire compare --exchange; name the method behind --exchange")
        if word.startswith("codec.") and subject is CODECS:
            raise ValueError(f"--{word}: options of a codec belong into its SPEC; write NAME:{word.removeprefix('codec.')}=VALUE")
        if "." not in word and word != "device":
            raise ValueError(f"unknown word --{word}; {near('--' + word.replace('_', '-'), own)}; thinwire compare --help lists all words")


def main(argv: list[str]) -> None:
    """Run the `compare` verb."""
    command = parse_compare(argv)
    from thinwire.board.run import run  # not at the top: it imports torch

    run(command)
