"""Run one stage of a run whose other stages are elsewhere: `thinwire join ROSTER --stage 1 --config laptop --keys keys`.

Two machines, two commands: see docs/two_machines.md. The roster says who the others are; the config must be the same everywhere, and
the links refuse each other with the name of what differs. With --standby the stage is that of whichever machine is lost.
"""

from __future__ import annotations

from typing import Any

from thinwire.cluster.places import PLACES_FILE, keep_places, known_places
from thinwire.cluster.recover import train_stage
from thinwire.cluster.seat import Seat
from thinwire.cluster.standby import Desk, Questions
from thinwire.cluster.watch import check_standbys
from thinwire.link.errors import LinkError
from thinwire.link.identity import Identity, load_identity
from thinwire.link.roster import Place, Roster, read_roster
from thinwire.metrics.news import cause, named, tell
from thinwire.metrics.progress import Progress
from thinwire.metrics.trackers.open import open_trackers
from thinwire.run.farewell import farewell, go_on_command, last_words
from thinwire.run.inputs import check_inputs
from thinwire.run.settings import JoinCommand, parse_join
from thinwire.run.stop import Stop
from thinwire.util.disk import shortage
from thinwire.util.lock import locked


def main(argv: list[str]) -> None:
    """Run the `join` verb."""
    command = parse_join(argv)
    with locked(command.run):
        join(command)


def join(command: JoinCommand) -> None:
    """Take a place in the run, and say how it ended."""
    identity, roster = load_identity(command.keys), known_places(read_roster(command.roster), command.run)
    check_standbys(command.config, roster)
    check_inputs(command.config, command.run, reads_data=command.stage == 0, stages=1)
    desk, stop = None, Stop()
    place = None if command.stage is None else Place(command.replica, command.stage)
    if place is None:
        desk = stand_by(command, identity, roster)
        place = desk.wait(stop)
        if place is None:
            desk.close()
            print("the run is over" if desk.over else "stopped: no place was taken")
            return
        print(f"{roster.called(desk.me.place)} takes the place of {roster.called(place)}", flush=True)
        roster = roster.taken_by(place, desk.me)
    elif (standby := roster.standby(identity.certificate)) is not None:
        raise ValueError(f"{identity.certificate_path} is the certificate of {standby.place} in the roster; say --standby, not --stage")
    seat = Seat(config=command.config, roster=roster, identity=identity, stage=place.stage, replica=place.replica, listen=command.listen)
    go_on = go_on_command("join", command.run, words_again(command))
    with farewell(command.run, go_on, None):
        summary = train(command, seat, stop, desk)
    if summary["val_loss"] is not None:
        who = place if command.config.replicas.count > 1 else f"stage {place.stage}"
        print(f"{who} done: validation loss {summary['val_loss']:.4f} after {summary['steps']} steps; {command.run}")
    if summary["val_loss"] is None or summary["steps"] < command.config.train.steps:  # not finished: a standby may yet be needed
        print(last_words(summary, command.run, go_on, None))
    elif place == Place(0, 0) and roster.standbys:
        Questions(roster, identity, desk.me.place if desk else Place(0, 0), command.config).ask_all("over")


def words_again(command: JoinCommand) -> list[str]:
    """Return the words with which this machine goes on; its settings are in the run folder."""
    place = ["--standby"] if command.stage is None else ["--stage", str(command.stage)]
    replica = ["--replica", str(command.replica)] if command.replica else []
    listen = [] if command.listen is None else ["--listen", command.listen]
    return [str(command.roster), *place, *replica, *listen, "--keys", str(command.keys)]


def stand_by(command: JoinCommand, identity: Identity, roster: Roster) -> Desk:
    """Open the desk at which this machine is asked to take a place, and say so."""

    def accept(place: Place) -> None:
        try:
            keep_places(roster.taken_by(place, desk.me), command.run)
        except OSError as error:
            raise ValueError(shortage(command.run / PLACES_FILE, error)) from error

    desk = Desk(roster, identity, command.config, accept, command.listen)
    if desk.place is None:
        me = roster.called(desk.me.place)
        print(f"{me} waits at {desk.me.address} to take the place of a machine that is lost; Ctrl-C ends it", flush=True)
    return desk


def train(command: JoinCommand, seat: Seat, stop: Stop, desk: Desk | None) -> dict[str, Any]:
    """Train the stage, with what people see of it; a lost link becomes an error for the user."""
    taking = desk is not None and not command.resume
    try:
        with (
            open_trackers(command.track, command.run, command.config, resume=command.resume) as curves,
            Progress.of(command.config, alone=command.config.pipeline.stages > 1) as progress,
        ):

            def report(event: dict[str, Any]) -> None:
                if "measured" in event:
                    progress.verdict.measured["here"] = event["mbps"]
                if text := tell(event):
                    progress.say(named(text, seat.roster))

            stop.tell = progress.say
            return train_stage(
                seat,
                command.run,
                resume=command.resume,
                replacing=taking,
                copies=True,
                trackers=[progress, *curves],
                stop=stop,
                report=report,
                desk=desk,
            )
    except LinkError as error:
        raise ValueError(named(cause(str(error)), seat.roster)) from error
