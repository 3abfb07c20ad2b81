"""What `thinwire train` was asked to do.

    thinwire train --config NAME|FILE --run DIR [--resume | --from RUN] [--track NAME ...] [--section.field VALUE ...]

Without --config the packaged config `laptop` is used; without --run the run goes to `runs/CONFIG-CODEC-SEED`, such as
`runs/laptop-subspace-0`. Options are read by `config/command_line.py`, what a resumed run may change is `run/resume.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from thinwire.config.command_line import DEFAULT_CONFIG, parse_config, scan
from thinwire.config.earlier import modern_arguments
from thinwire.config.registry import TRACKERS
from thinwire.config.sections import RunConfig
from thinwire.config.toml import load_config
from thinwire.metrics.trackers.open import check_names
from thinwire.run.check import check, resolve
from thinwire.run.resume import forked, refuse_used, resumed, run_folder


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """What `thinwire train` was asked to do."""

    config: RunConfig
    run: Path
    resume: bool
    fork: Path | None = None
    """The run from whose newest checkpoint this new one begins."""
    track: tuple[str, ...] = ()
    """Trackers beside the metrics file."""


def parse_train(argv: list[str]) -> TrainCommand:
    """Read the options of `thinwire train` into a checked command."""
    argv = modern_arguments(argv)
    given, track, fork = scan(argv), named_trackers(argv), None
    if "from" in given and "help" not in given:
        fork, run, config = forked(argv, given)
    elif "resume" in given and "help" not in given:
        run, config = resumed(argv, given)
    else:
        config = parse_config(argv, load_config(given.get("config") or DEFAULT_CONFIG))
        run = run_folder(given, config)
        refuse_used(run)
    check(config)
    return TrainCommand(config=resolve(config), run=run, resume="resume" in given or fork is not None, fork=fork, track=track)


def named_trackers(argv: list[str]) -> tuple[str, ...]:
    """List the names that stand behind --track."""
    names: list[str] = []
    option = ""
    for token in argv:
        if token.startswith("-"):
            option, equals, value = token.partition("=")
            names += [value] if option == "--track" and equals else []
        elif option == "--track":
            names.append(token)
    if "--track" in argv and not names:
        raise ValueError(
            f"--track stands without a name; choose from {', '.join(TRACKERS.names())}, or leave it out: metrics/*.jsonl is always written"
        )
    return check_names(names)
