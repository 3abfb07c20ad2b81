"""What `thinwire join` was asked to do: a roster, --stage, --keys, and all the options of `thinwire train`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path

from thinwire.config.command_line import scan
from thinwire.run.command import TrainCommand, parse_train


@dataclass(frozen=True, kw_only=True)
class JoinCommand(TrainCommand):
    """What `thinwire join` was asked to do."""

    roster: Path
    keys: Path
    stage: int | None
    """None: that of whichever machine is lost."""
    replica: int
    listen: str | None


def parse_join(argv: list[str]) -> JoinCommand:
    """Read the options of `thinwire join`."""
    own = argparse.ArgumentParser(
        prog="thinwire join",
        allow_abbrev=False,
        description="Run one stage of a roster on this machine. All the options of `thinwire train` can follow, the same everywhere.",
    )
    own.add_argument("roster", type=Path, help="roster file that every worker has (`thinwire roster`)")
    stage = own.add_mutually_exclusive_group(required=True)
    stage.add_argument("--stage", type=int, help="stage that this machine runs, from 0")
    own.add_argument("--replica", type=int, default=0, help="copy of the pipeline that this machine belongs to, from 0 (default: 0)")
    stage.add_argument("--standby", action="store_true", help="wait, and take the place of a machine that is lost")
    own.add_argument("--keys", type=Path, default=Path("keys"), help="folder that `thinwire keys` made here (default: keys)")
    own.add_argument("--listen", help="address to listen on if it is not the roster's, such as 0.0.0.0:29400 behind a forwarded port")
    if argv and argv[0].startswith("--") and argv[0] != "--help":
        raise ValueError(
            f"the first thing after `thinwire join` is the roster file, not {argv[0]}; write: thinwire join ROSTER --stage N ..."
        )
    mine, rest = own.parse_known_args(argv)
    if "from" in scan(rest):
        raise ValueError(
            "--from is an option of `thinwire train`: on several machines copy each run folder, and go on in the copies with --resume"
        )
    if "run" not in scan(rest):
        copy = f"replica-{mine.replica}-" if mine.replica else ""
        rest += ["--run", "runs/standby" if mine.standby else f"runs/{copy}stage-{mine.stage}"]
    train = parse_train([*rest, "--pipeline.mode", "workers"])
    given = {entry.name: getattr(train, entry.name) for entry in fields(TrainCommand)}
    return JoinCommand(**given, roster=mine.roster, keys=mine.keys, stage=mine.stage, replica=mine.replica, listen=mine.listen)
