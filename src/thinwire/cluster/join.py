"""Run one stage of a run whose other stages are elsewhere: `thinwire join ROSTER --stage 1 --config laptop --keys keys`.

Two machines, two commands: see docs/two_machines.md. The roster says who the others are; the config must be the same everywhere, and
the links refuse each other with the name of what differs. With --standby the stage is that of whichever machine is lost.
"""

from __future__ import annotations

from typing import Any

from thinwire.cluster.join_command import JoinCommand, parse_join
from thinwire.cluster.membership import Membership
from thinwire.cluster.places import Places, read_places
from thinwire.cluster.recover import train_stage
from thinwire.cluster.standby import StandbyClient, StandbyServer
from thinwire.cluster.watch import check_standbys
from thinwire.link.endpoint import Endpoint
from thinwire.link.errors import LinkError
from thinwire.link.identity import Identity, load_identity
from thinwire.link.peer import WorkerId
from thinwire.link.roster import read_roster
from thinwire.metrics.news import named, tell
from thinwire.metrics.progress import Progress
from thinwire.metrics.trackers.open import open_trackers
from thinwire.run.farewell import farewell, go_on_command, last_words
from thinwire.run.inputs import check_inputs
from thinwire.run.stop import Stop
from thinwire.util.lock import locked


def main(argv: list[str]) -> None:
    """Run the `join` verb."""
    command = parse_join(argv)
    with locked(command.run):
        join(command)


def join(command: JoinCommand) -> None:
    """Be a worker of the run, and say how it ended."""
    identity, places = load_identity(command.keys), read_places(read_roster(command.roster), command.run)
    check_standbys(command.config, places.roster)
    check_inputs(command.config, command.run, reads_data=command.stage == 0, stages=1)
    server, stop = None, Stop()
    worker_id = None if command.stage is None else WorkerId(command.replica, command.stage)
    if worker_id is None:
        server = stand_by(command, identity, places)
        worker_id = server.wait(stop)
        if worker_id is None:
            server.close()
            print("the run is over" if server.over else "stopped: no place was taken")
            return
        print(f"{places.called(server.me.id)} takes the place of {places.roster.called(worker_id)}", flush=True)
    elif (standby := places.roster.standby(identity.certificate)) is not None:
        raise ValueError(f"{identity.certificate_path} is the certificate of {standby.id} in the roster; say --standby, not --stage")
    member = Membership(
        config=command.config, places=places, identity=identity, stage=worker_id.stage, replica=worker_id.replica, listen=command.listen
    )
    go_on = go_on_command("join", command.run, options_again(command))
    with farewell(command.run, go_on, None):
        summary = train_member(command, member, stop, server)
    if summary["val_loss"] is not None:
        who = worker_id if command.config.replicas.count > 1 else f"stage {worker_id.stage}"
        print(f"{who} done: validation loss {summary['val_loss']:.4f} after {summary['steps']} steps; {command.run}")
    if summary["val_loss"] is None or summary["steps"] < command.config.train.steps:  # not finished: a standby may yet be needed
        print(last_words(summary, command.run, go_on, None))
    elif worker_id == WorkerId(0, 0) and places.roster.standbys:
        StandbyClient(places.roster, Endpoint(identity), server.me.id if server else WorkerId(0, 0), command.config).ask_all("over")


def options_again(command: JoinCommand) -> list[str]:
    """Return the options with which this machine goes on; its settings are in the run folder."""
    worker_id = ["--standby"] if command.stage is None else ["--stage", str(command.stage)]
    replica = ["--replica", str(command.replica)] if command.replica else []
    listen = [] if command.listen is None else ["--listen", command.listen]
    return [str(command.roster), *worker_id, *replica, *listen, "--keys", str(command.keys)]


def stand_by(command: JoinCommand, identity: Identity, places: Places) -> StandbyServer:
    """Open the server at which this machine is asked to replace a lost one, and say so."""
    server = StandbyServer(places, Endpoint(identity), command.config, command.listen).open()
    if server.worker_id is None:
        me = places.called(server.me.id)
        print(f"{me} waits at {server.me.address} to take the place of a machine that is lost; Ctrl-C ends it", flush=True)
    return server


def train_member(command: JoinCommand, member: Membership, stop: Stop, server: StandbyServer | None) -> dict[str, Any]:
    """Train the stage, with what people see of it; a lost link becomes an error for the user."""
    taking = server is not None and not command.resume
    try:
        with (
            open_trackers(command.track, command.run, command.config, resume=command.resume) as curves,
            Progress.of(command.config, alone=command.config.pipeline.stages > 1) as progress,
        ):

            def report(event: dict[str, Any]) -> None:
                if "measured" in event:
                    progress.verdict.measured["here"] = event["mbps"]
                if text := tell(event):
                    progress.say(named(text, member.places.called))

            stop.tell = progress.say
            return train_stage(
                member,
                command.run,
                resume=command.resume,
                replacing=taking,
                copies=True,
                trackers=[progress, *curves],
                stop=stop,
                report=report,
                server=server,
            )
    except LinkError as error:
        raise ValueError(named(error.reason, member.places.called)) from error
