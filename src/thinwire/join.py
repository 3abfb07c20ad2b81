"""Run one stage of a run whose other stages are elsewhere: `thinwire join ROSTER --stage 1 --config laptop --keys keys`.

Two machines, two commands: see docs/two_machines.md. The roster says who the others are; the config must be the same everywhere, and
the links refuse each other with the name of what differs.
"""

from __future__ import annotations

from thinwire.link.errors import LinkError
from thinwire.link.roster import read_roster
from thinwire.link.tls import load_identity
from thinwire.recover import train_stage
from thinwire.seat import Seat
from thinwire.settings import parse_join
from thinwire.stop import Stop
from thinwire.track import Progress
from thinwire.trackers.registry import open_trackers
from thinwire.train import how_to_go_on


def main(argv: list[str]) -> None:
    """Run the `join` verb."""
    command = parse_join(argv)
    seat = Seat(
        config=command.config,
        roster=read_roster(command.roster),
        identity=load_identity(command.keys),
        stage=command.stage,
        listen=command.listen,
    )
    try:
        with (
            open_trackers(command.track, command.run, command.config, resume=command.resume) as curves,
            Progress(command.config.train.steps) as progress,
        ):
            summary = train_stage(seat, command.run, resume=command.resume, copies=True, trackers=[progress, *curves], stop=Stop())
    except LinkError as error:
        raise ValueError(str(error)) from error
    if summary["steps"] < command.config.train.steps:
        words = f"{command.roster} --stage {command.stage} --keys {command.keys} --run {command.run}"
        print(how_to_go_on(summary, f"thinwire join {words} --resume (on every machine)"))
    if summary["val_loss"] is not None:
        print(f"stage {command.stage} done: validation loss {summary['val_loss']:.4f} after {summary['steps']} steps; {command.run}")
