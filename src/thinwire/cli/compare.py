"""Judge methods by the time they take to a loss over links: `thinwire compare`. No torch before the options are read.

    thinwire compare SPEC [SPEC ...] | @FILE ... | --all [--config small] [--links dsl_2mbps home_80mbps] [--steps N] [--seeds 0 1 2]
                     [--target LOSS] [--name screen] [--out out/board] [--end-to-end] [--redraw] [any option of `thinwire train`]
    thinwire compare --exchange METHOD [METHOD ...] --replicas.count 2 [the same options; --out out/exchanges]

A SPEC is `NAME[:OPTION=VALUE,...]`: a boundary method, or behind --exchange a way in which replicas learn from each other.
What is measured and how it is scored: `board/measure.py`, `board/score.py`.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from thinwire.board.request import LINKS, OURS, SKIPPED_STEPS, Request, Spec, parse_specs
from thinwire.board.subjects import CODECS, EXCHANGES, Subject
from thinwire.config.command_line import scan
from thinwire.config.profiles import find_profile
from thinwire.config.values import near


class CompareParser(argparse.ArgumentParser):
    """Parse options; what is wrong with them is a ValueError, as everywhere."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; SPECs come first, thinwire compare --help lists the options")


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


def parser() -> tuple[CompareParser, set[str]]:
    """Make the parser of the verb's own options; return it and those options."""
    own = CompareParser(prog="thinwire compare", allow_abbrev=False, description="Judge methods by time to loss over links.")
    own.epilog = "Any option of `thinwire train` can follow and goes for all specs, such as --pipeline.stages 4 --train.validate_every 50."
    own.add_argument("specs", nargs="*", metavar="SPEC", help=f"boundary method: {CODECS.form}; @FILE: one per line, `# text` is a heading")
    replicas = f"ways in which replicas learn from each other, instead of SPECs: {EXCHANGES.form}, or @FILE; needs --replicas.count"
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
    for name, form in table.items():
        own.add_argument(name, **form)
    return own, {*table, "--help"}


def split(argv: list[str], known: set[str]) -> tuple[list[str], list[str]]:
    """Tell the verb's own options, and what follows them, from those of `thinwire train`."""
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


def parse_compare(argv: list[str]) -> Request:
    """Read the options of `thinwire compare`; what needs torch to be checked is `board/cases.py`'s."""
    own, known = parser()
    mine, theirs = split(argv, known)
    given = own.parse_args(mine)
    subject = EXCHANGES if given.exchange else CODECS
    refuse_options(theirs, known, subject)
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
    return Request(**values, subject=subject, options=tuple(theirs), line=line)


def specs_of(given: argparse.Namespace) -> tuple[Spec, ...]:
    """Read what is to be compared; none: every codec."""
    if given.exchange and (given.specs or given.all):
        other = "--all" if given.all else f"the SPEC {given.specs[0]}"
        raise ValueError(f"both {other} and --exchange are given; compare boundary methods or exchanges: leave one of them out")
    if given.exchange:
        return parse_specs(given.exchange, EXCHANGES)
    if given.all == bool(given.specs):
        raise ValueError(
            f"{'both SPECs and --all are given' if given.all else 'nothing to compare'}; give SPECs ({CODECS.form}), @FILE, or --all"
        )
    return parse_specs(given.specs, CODECS)


def refuse_options(options: list[str], own: set[str], subject: Subject) -> None:
    """Refuse options of `thinwire train` that the comparison decides, and options of nobody."""
    for name in scan(options):
        if name in OURS:
            raise ValueError(f"--{name} is not for thinwire compare; {OURS[name]}")
        subject.refuse_option(name)
        if "." not in name and name != "device":
            raise ValueError(
                f"unknown option --{name}; {near('--' + name.replace('_', '-'), own)}; thinwire compare --help lists all options"
            )


def main(argv: list[str]) -> None:
    """Run the `compare` verb."""
    request = parse_compare(argv)
    from rich.console import Console  # not at the top: --help answers without them

    from thinwire.board.comparison import run_comparison
    from thinwire.board.report import print_board

    live = sys.stdout.isatty()
    found = run_comparison(request, partial(print, flush=True), live)
    print_board(found.board, found.facts, Console(markup=False) if live else Console(width=120, markup=False))
    print(f"table: {found.table}{f', all boards: {found.page}' if found.page else ''}\n{found.drawn}")
    if found.failed:
        raise ValueError(f"{len(found.failed)} rows are missing; {found.failed[0]}; leave that spec out, or change it")
