"""Run one stage of a run whose other stages are elsewhere: `thinwire join ROSTER --stage 1 --config laptop --keys keys`.

Two machines, two commands: see docs/two_machines.md. The roster says who the others are; the config must be the same everywhere, and
the links refuse each other with the name of what differs. With --standby the stage is that of whichever machine is lost.
"""

from __future__ import annotations

from typing import Any

from thinwire.link.errors import LinkError
from thinwire.link.roster import Place, Roster, read_roster
from thinwire.link.tls import Identity, load_identity
from thinwire.lock import locked
from thinwire.places import keep_places, known_places
from thinwire.recover import train_stage
from thinwire.seat import Seat
from thinwire.settings import JoinCommand, parse_join
from thinwire.standby import Desk, Questions
from thinwire.stop import Stop
from thinwire.track import Progress
from thinwire.trackers.registry import open_trackers
from thinwire.train import how_to_go_on
from thinwire.watch import check_standbys


def main(argv: list[str]) -> None:
    """Run the `join` verb."""
    command = parse_join(argv)
    with locked(command.run):
        join(command)


def join(command: JoinCommand) -> None:
    """Take a place in the run, and say how it ended."""
    identity, roster = load_identity(command.keys), known_places(read_roster(command.roster), command.run)
    check_standbys(command.config, roster)
    desk, stop = None, Stop()
    place = None if command.stage is None else Place(command.replica, command.stage)
    if place is None:
        desk = stand_by(command, identity, roster)
        place = desk.wait(stop)
        if place is None:
            desk.close()
            print("the run is over" if desk.over else "stopped: no place was taken")
            return
        print(f"{desk.me.place} takes the place of {place}", flush=True)
        roster = roster.taken_by(place, desk.me)
    elif (standby := roster.standby(identity.certificate)) is not None:
        raise ValueError(f"{identity.certificate_path} is the certificate of {standby.place} in the roster; say --standby, not --stage")
    seat = Seat(config=command.config, roster=roster, identity=identity, stage=place.stage, replica=place.replica, listen=command.listen)
    summary = train(command, seat, stop, desk)
    if summary["steps"] < command.config.train.steps:
        words = f"--stage {place.stage}{f' --replica {place.replica}' if place.replica else ''}" if desk is None else "--standby"
        words = f"{command.roster} {words} --keys {command.keys} --run {command.run}"
        print(how_to_go_on(summary, f"thinwire join {words} --resume (on every machine)"))
    elif place == Place(0, 0) and roster.standbys:
        Questions(roster, identity, desk.me.place if desk else Place(0, 0), command.config).ask_all("over")
    if summary["val_loss"] is not None:
        who = place if command.config.replicas.count > 1 else f"stage {place.stage}"
        print(f"{who} done: validation loss {summary['val_loss']:.4f} after {summary['steps']} steps; {command.run}")


def stand_by(command: JoinCommand, identity: Identity, roster: Roster) -> Desk:
    """Open the desk at which this machine is asked to take a place, and say so."""

    def accept(place: Place) -> None:
        keep_places(roster.taken_by(place, desk.me), command.run)

    desk = Desk(roster, identity, command.config, accept, command.listen)
    if desk.place is None:
        print(f"{desk.me.place} waits at {desk.me.address} to take the place of a machine that is lost; Ctrl-C ends it", flush=True)
    return desk


def train(command: JoinCommand, seat: Seat, stop: Stop, desk: Desk | None) -> dict[str, Any]:
    """Train the stage, with what people see of it; a lost link becomes an error for the user."""
    taking = desk is not None and not command.resume
    try:
        with (
            open_trackers(command.track, command.run, command.config, resume=command.resume) as curves,
            Progress(command.config.train.steps) as progress,
        ):
            return train_stage(
                seat,
                command.run,
                resume=command.resume,
                replacing=taking,
                copies=True,
                trackers=[progress, *curves],
                stop=stop,
                desk=desk,
            )
    except LinkError as error:
        raise ValueError(str(error)) from error
