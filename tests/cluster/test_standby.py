"""Standbys: what they are asked and answer, and runs in which one takes the place of a lost machine by itself."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.test_join import assert_same, join_words
from faults.by_hand import Hand, ended, signal_to, steps_done
from faults.inject import Fault
from jobs import local_roster, run_config
from patience import HANG, wait_until
from runs import train
from thinwire.cli import main as cli
from thinwire.cluster import standby
from thinwire.cluster.join_command import parse_join
from thinwire.cluster.places import PLACES_FILE, Places
from thinwire.cluster.scratch import free_ports
from thinwire.cluster.standby import SERVICE, Answer, StandbyClient, StandbyServer
from thinwire.cluster.watchdog import EXIT_STUCK
from thinwire.link.contract import Contract
from thinwire.link.endpoint import Endpoint
from thinwire.link.errors import LinkError
from thinwire.link.frame import Channel, Frame, Kind
from thinwire.link.link import Link
from thinwire.link.peer import WorkerId
from thinwire.link.roster import Roster
from thinwire.run.stop import Stop

CONFIG = run_config(3, "auto", {"name": "dense"})
FIRST, MIDDLE, LAST = (WorkerId(0, stage) for stage in range(3))


@pytest.fixture(autouse=True)
def patience(monkeypatch) -> None:
    """Let questions take as long as a busy machine needs."""
    monkeypatch.setattr(standby, "ASK_SECONDS", HANG)
    monkeypatch.setattr(standby, "OPTIONS", replace(standby.OPTIONS, establish_seconds=HANG, reconnect_seconds=HANG))


@pytest.fixture
def roster(identities) -> Roster:
    return local_roster(identities, 3, standbys=2)


@contextlib.contextmanager
def server_of(roster: Roster, identity, config=CONFIG) -> Iterator[StandbyServer]:
    server = StandbyServer(Places(roster), Endpoint(identity), config).open()
    try:
        yield server
    finally:
        server.close()


def test_a_standby_takes_one_place_and_says_so_to_everyone(roster, identities):
    first, last = (StandbyClient(roster, Endpoint(identities[stage]), WorkerId(0, stage), CONFIG) for stage in (0, 2))
    with server_of(roster, identities[3]) as server:
        assert first.ask(server.me, "which") == Answer(server.me, None)
        assert server.worker_id is None and not server.changed.is_set()
        assert first.ask(server.me, "take", MIDDLE).worker_id == MIDDLE
        assert last.ask(server.me, "take", MIDDLE).worker_id == MIDDLE  # the other neighbour arrives at the same one
        assert first.ask(server.me, "take", LAST).worker_id == MIDDLE  # taken
        assert server.wait(Stop()) == MIDDLE and server.places.worker(MIDDLE).certificate == server.me.certificate
        assert last.ask(server.me, "over").worker_id == MIDDLE and not server.over  # one that has a place ends with the others
        with server_of(roster, identities[4]) as other:
            known = StandbyClient(roster, Endpoint(identities[4]), other.me.id, CONFIG).ask_all()
            assert known == [Answer(server.me, MIDDLE)]  # not itself


def test_a_standby_that_is_not_needed_hears_that_the_run_is_over(roster, identities, monkeypatch):
    with server_of(roster, identities[4]) as server:
        with monkeypatch.context() as patch:  # nobody is there: no need to wait long
            patch.setattr(standby, "OPTIONS", replace(standby.OPTIONS, reconnect_seconds=0.5))
            absent = StandbyClient(roster, Endpoint(identities[0]), FIRST, CONFIG).ask(roster.standbys[0], "over")
        assert "no connection to standby 0" in absent.problem
        answer = StandbyClient(roster, Endpoint(identities[0]), FIRST, CONFIG).ask(server.me, "over")
        assert server.wait(Stop()) is None and server.over and answer == Answer(server.me, None)
        assert StandbyClient(roster, Endpoint(identities[0]), FIRST, CONFIG).ask(server.me, "take", MIDDLE).worker_id is None  # too late


def test_a_worker_id_that_cannot_be_written_down_is_not_taken(roster, identities, tmp_path, capsys):
    (tmp_path / "run").write_text("no folder")
    server = StandbyServer(Places(roster, tmp_path / "run"), Endpoint(identities[3]), CONFIG).open()
    assert StandbyClient(roster, Endpoint(identities[0]), FIRST, CONFIG).ask(server.me, "take", MIDDLE) == Answer(server.me, None)
    server.close()
    assert server.worker_id is None and "cannot take the place of replica 0 stage 1: File exists" in capsys.readouterr().err


def test_strangers_and_other_settings_get_no_answer(roster, identities, capsys):
    other = replace(CONFIG, train=replace(CONFIG.train, rate=0.5))
    with server_of(roster, identities[3]) as server:
        answer = StandbyClient(roster, Endpoint(identities[5]), FIRST, CONFIG).ask(server.me, "take", MIDDLE)
        assert "refused this worker" in answer.problem
        answer = StandbyClient(roster, Endpoint(identities[0]), FIRST, other).ask(server.me, "take", MIDDLE)
        assert "config train.rate" in answer.problem and server.worker_id is None
        answer = StandbyClient(roster, Endpoint(identities[0]), MIDDLE, CONFIG).ask(
            server.me, "take", LAST
        )  # the certificate of another place
        assert "expected replica 0 stage 0" in answer.problem and server.worker_id is None
    assert "cannot answer replica 0 stage 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "message",
    [
        b"{",
        b"[]",
        b"{}",
        b"[" * 500,
        b'{"word": "take", "place": null}',
        b'{"word": "take", "place": [0, 7]}',
        b'{"word": "take", "place": [0, true]}',
        b'{"word": "take", "place": "0"}',
        b'{"word": "which", "place": [0, 1]}',
        b'{"word": ["take"], "place": [0, 1]}',
        b'{"word": "take", "place": [0, 1]}' + b" " * 1000,
    ],
)
def test_a_question_that_is_none_is_refused(roster, identities, message, capsys):
    with server_of(roster, identities[3]) as server:
        client = StandbyClient(roster, Endpoint(identities[0]), FIRST, CONFIG)
        link = Link.connect(server.me, Endpoint(identities[0]), client.terms, Contract(), service=SERVICE)
        link.send(Frame.make(Kind.STEP, message, epoch=0))
        with pytest.raises(LinkError, match="frame refused"):
            link.receive(Channel.CONTROL, HANG)
        link.close()
        assert server.worker_id is None and not server.over


def test_only_a_standby_of_the_roster_can_stand_by(roster, identities):
    with pytest.raises(ValueError, match=r"lists no standby with the certificate.*--standby"):
        StandbyServer(Places(roster), Endpoint(identities[0]), CONFIG)


# What people type -----------------------------------------------------------------------------------------------------------------------


def crowd(folder: Path, addresses: list[str], standbys: int) -> tuple[list[Path], list[Path]]:
    """Make machines and standbys, each with keys of its own and the roster that all have."""
    entries: list[str] = []
    homes: list[Path] = []
    for number, address in enumerate([*addresses, *(f"127.0.0.1:{port}" for port in free_ports(standbys))]):
        homes.append(folder / f"machine-{number}")
        assert cli.main(["keys", str(homes[-1] / "keys")]) == 0
        entries += ["--stage" if number < len(addresses) else "--standby", f"{address}={homes[-1] / 'keys/certificate.pem'}"]
    assert cli.main(["roster", str(folder / "roster.toml"), *entries]) == 0
    for home in homes:
        shutil.copy(folder / "roster.toml", home / "roster.toml")
    return homes[: len(addresses)], homes[len(addresses) :]


def standby_words(home: Path, config: str, *words: str) -> list[str]:
    """Return what a person types on a standby."""
    line = join_words(home, 0, config, *words)
    at = line.index("--stage")
    return [*line[:at], "--standby", *line[at + 2 :]]


def test_the_roster_lists_standbys_and_refuses_one_without_an_address(tmp_path, capsys):
    crowd(tmp_path, ["127.0.0.1:29400"], standbys=1)
    printed = capsys.readouterr().out
    assert "standby 0  127.0.0.1" in printed and "give this file to every worker and standby" in printed
    entries = [
        f"--standby=none={tmp_path / 'machine-1/keys/certificate.pem'}",
        f"--stage=a:1={tmp_path / 'machine-0/keys/certificate.pem'}",
    ]
    assert cli.main(["roster", str(tmp_path / "other.toml"), *entries]) == 2
    assert "standby 0 has no address" in capsys.readouterr().err and not (tmp_path / "other.toml").exists()


def test_a_standby_has_no_stage_of_its_own(tmp_path, config, capsys):
    (home,), (spare,) = crowd(tmp_path, ["127.0.0.1:29400"], standbys=1)
    assert parse_join(standby_words(spare, config)[1:]).stage is None
    with pytest.raises(SystemExit):
        parse_join([*standby_words(spare, config)[1:], "--stage", "1"])
    assert "not allowed with argument" in capsys.readouterr().err
    assert cli.main(join_words(spare, 0, config)) == 2
    assert "is the certificate of standby 0 in the roster; say --standby" in capsys.readouterr().err
    assert cli.main(standby_words(home, config)) == 2
    assert "lists no standby with the certificate" in capsys.readouterr().err


WORDS = ("--pipeline.stages", "3", "--train.steps", "40", "--train.checkpoint_every", "4", "--train.validate_every", "0")
LINK = ("--link.profile", "100mbps_10ms", "--link.silent_seconds", "3", "--link.standby_seconds", "1", "--link.reconnect_seconds", "300")
PATIENT = ("--link.standby_seconds", "8")
"""Where two stages survive side by side: longer than one of them needs to go over to the next epoch."""


class Run:
    """A run of three machines with standbys, started by hand; machines may stand still before a step (`machine_1=20`)."""

    def __init__(
        self,
        folder: Path,
        config: str,
        hand: Hand,
        *more: str,
        standbys: int,
        last: str | None = None,
        fault: Fault | None = None,
        **hold: int,
    ) -> None:
        ports = [f"127.0.0.1:{port}" for port in free_ports(3)]
        self.homes, self.spares = crowd(folder, [*ports[:2], last or ports[2]], standbys)
        self.hand, self.processes, self.hold = hand, {}, hold
        words = (*WORDS, *LINK, *more)
        self.words = {home.name: join_words(home, stage, config, *words) for stage, home in enumerate(self.homes)}
        self.words |= {home.name: standby_words(home, config, *words) for home in self.spares}
        for home in (*self.spares, *self.homes):
            self.start(home, faults=[fault] if fault and home == self.homes[fault.stage] else [])

    def start(self, home: Path, *more: str, name: str = "", faults: Sequence[Fault] = ()) -> None:
        name = name or home.name
        self.processes[name] = self.hand.start([*self.words[home.name], *more], name, faults, hold=self.hold.get(name.replace("-", "_")))

    def await_copy(self, stage: int, keeper: int) -> None:
        """Wait until the machine of a stage stands still and a neighbour keeps a checkpoint of it."""
        self.hand.await_hold(self.homes[stage].name)
        wait_until(lambda: list((self.homes[keeper] / "run/copies").glob(f"step-*/stage-{stage}.json")))

    def lose(self, home: Path) -> None:
        """Lose a machine with its disk."""
        signal_to(self.processes[home.name], signal.SIGKILL)
        self.processes.pop(home.name).join()
        shutil.rmtree(home / "run")

    def finish(self, *expected_to_fail: str) -> None:
        """Wait for all; those not named must end well."""
        codes = {name: ended(process) for name, process in self.processes.items()}
        wanted = {name: 2 if name in expected_to_fail else 0 for name in codes}
        assert codes == wanted, [self.hand.printed(name) for name in codes if codes[name] != wanted[name]]

    def taken(self, home: Path) -> list[int]:
        """Return the stages that a machine knows to be a standby's."""
        return [entry["stage"] for entry in json.loads((home / "run" / PLACES_FILE).read_text())["taken"]]


def first_step(home: Path, stage: int) -> int:
    return json.loads((home / f"run/metrics/stage-{stage}.jsonl").read_text().splitlines()[0])["step"]


def test_a_standby_takes_the_place_of_a_lost_machine(config, tmp_path):
    """Both neighbours of a machine that is lost with its disk find the same standby; nobody types anything."""
    alone = train(config, tmp_path / "alone", *WORDS)
    with Hand(tmp_path) as hand:
        run = Run(tmp_path, config, hand, standbys=1, machine_1=20)
        run.await_copy(1, keeper=2)
        run.lose(run.homes[1])
        run.finish()
        out, _ = hand.printed(run.spares[0].name)
    assert out.startswith("standby 0 waits at 127.0.0.1") and "Ctrl-C ends it" in out
    assert "standby 0 takes the place of replica 0 stage 1" in out and "stage 1 done" in out
    assert_same(run.homes[0], alone)
    assert first_step(run.spares[0], 1) > 4  # from the neighbour's copy
    assert [run.taken(home) for home in (run.homes[0], run.homes[2], run.spares[0])] == [[1], [1], [1]]


@pytest.mark.full
def test_a_standby_takes_the_place_of_a_stuck_machine(config, tmp_path):
    """The machine finds out by itself that its computing thread is stuck, and ends."""
    alone = train(config, tmp_path / "alone", *WORDS)
    with Hand(tmp_path) as hand:
        run = Run(tmp_path, config, hand, "--train.stuck_seconds", "8", standbys=1, fault=Fault(1, "forward", 50, "stuck"))
        assert ended(run.processes.pop(run.homes[1].name)) == EXIT_STUCK
        run.finish()
        assert "stage 1 done" in hand.printed(run.spares[0].name)[0]
    assert_same(run.homes[0], alone)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_standby_that_waits_ends_on_request(config, tmp_path, number):
    _, (spare,) = crowd(tmp_path, ["127.0.0.1:29400"], standbys=1)
    with Hand(tmp_path) as hand:
        process = hand.start(standby_words(spare, config), "spare")
        wait_until(lambda: (tmp_path / "spare.err").exists() and "waits at" in hand.printed("spare")[0])
        signal_to(process, number)
        assert ended(process) == 0
        out, error = hand.printed("spare")
    assert "no place was taken" in out and not error
    assert not (spare / "run").exists()


def test_a_standby_goes_on_waiting_when_a_run_ends_in_its_last_validation(config, tmp_path):
    """All steps are done, but the run is not: whoever resumes it may need a standby."""
    text = tmp_path / "text.txt"
    text.write_text(text.read_text() * 60)  # enough of it for a validation that takes minutes
    homes, (spare,) = crowd(tmp_path, [f"127.0.0.1:{port}" for port in free_ports(2)], standbys=1)
    words = ("--train.validation_sequences", "100000", "--train.validate_every", "0")
    with Hand(tmp_path) as hand:
        waiting = hand.start(standby_words(spare, config, *words), "spare")
        running = [hand.start(join_words(home, stage, config, *words), f"stage-{stage}") for stage, home in enumerate(homes)]
        wait_until(lambda: steps_done(homes[0] / "run", 0) == 6, alive=lambda: running[0].exitcode is None)
        signal_to(running[0], signal.SIGTERM)
        assert [ended(each) for each in running] == [0, 0], [hand.printed(f"stage-{stage}") for stage in range(2)]
        signal_to(waiting, signal.SIGTERM)
        assert ended(waiting) == 0 and "no place was taken" in hand.printed("spare")[0]
        for stage, home in enumerate(homes):
            kept = home / "run/checkpoints/step-000006"
            assert f"stopped at step 6; kept: {kept} (this machine's part)\ngo on with: thinwire join" in hand.printed(f"stage-{stage}")[0]


@pytest.mark.full
def test_the_first_stage_is_lost_and_comes_back_too_late(config, tmp_path):
    """The old machine still has its disk: it is told that its place is taken. A second standby hears that the run is over."""
    alone = train(config, tmp_path / "alone", *WORDS)
    with Hand(tmp_path) as hand:
        run = Run(tmp_path, config, hand, *PATIENT, standbys=2, machine_0=20, machine_3=30)
        run.await_copy(0, keeper=1)
        signal_to(run.processes[run.homes[0].name], signal.SIGKILL)
        run.processes.pop(run.homes[0].name).join()
        hand.await_hold(run.spares[0].name)
        run.start(run.homes[0], "--resume", name="old")
        assert ended(run.processes["old"]) == 2
        hand.let_go(run.spares[0].name)
        run.finish("old")
        assert "has taken the place of this worker, replica 0 stage 0" in hand.printed("old")[1]
        assert "the run is over" in hand.printed(run.spares[1].name)[0]
    assert_same(run.spares[0], alone)


@pytest.mark.full
def test_a_frozen_machine_wakes_up_after_a_standby_took_its_place(config, tmp_path):
    """The last stage only dials out. It ends and says why: never two workers of one stage."""
    alone = train(config, tmp_path / "alone", *WORDS)
    with Hand(tmp_path) as hand:
        run = Run(tmp_path, config, hand, *PATIENT, standbys=1, last="none", machine_2=20)
        run.await_copy(2, keeper=1)
        old = run.processes[run.homes[2].name]
        signal_to(old, signal.SIGSTOP)
        hand.let_go(run.homes[2].name)
        wait_until(lambda: steps_done(run.spares[0] / "run", 2) > 0)
        signal_to(old, signal.SIGCONT)
        run.finish(run.homes[2].name)
        error = hand.printed(run.homes[2].name)[1]
        assert "has taken the place of this worker" in error and "Traceback" not in error, error
    assert_same(run.homes[0], alone)


@pytest.mark.full
def test_a_standby_is_lost_too_and_then_all_are_started_again(config, tmp_path):
    """The next standby takes over from the first; a stop and --resume everywhere find everyone in the new places."""
    alone = train(config, tmp_path / "alone", *WORDS)
    with Hand(tmp_path) as hand:
        run = Run(tmp_path, config, hand, standbys=2, machine_1=20, machine_3=28, machine_4=36)
        run.await_copy(1, keeper=2)
        run.lose(run.homes[1])
        hand.await_hold(run.spares[0].name)
        run.lose(run.spares[0])
        hand.await_hold(run.spares[1].name)
        signal_to(run.processes[run.homes[0].name], signal.SIGTERM)
        hand.let_go(run.spares[1].name)
        run.finish()
        assert steps_done(run.homes[0] / "run", 0) < 40
        assert "--standby" in hand.printed(run.spares[1].name)[0]
        for home in (run.homes[0], run.homes[2], run.spares[1]):
            run.start(home, "--resume")
        run.finish()
    assert_same(run.homes[0], alone)


@pytest.mark.full
def test_copies_that_take_longer_than_checkpoints_are_apart_are_enough(config, tmp_path):
    """On a slow line copies are always behind: there is still a step that the others have and the keeper too."""
    alone = train(config, tmp_path / "alone", *WORDS)
    slow = ("--link.profile", "1mbps_10ms", "--link.pace_mbps", "0.2", "--train.checkpoint_every", "2")
    with Hand(tmp_path) as hand:
        run = Run(tmp_path, config, hand, *slow, standbys=1)

        def behind() -> bool:
            kept = [int(path.parent.name[-6:]) for path in (run.homes[2] / "run/copies").glob("step-*/stage-1.json")]
            return bool(kept) and steps_done(run.homes[0] / "run", 0) > max(kept) + 6

        wait_until(behind)
        run.lose(run.homes[1])
        run.finish()
    assert_same(run.homes[0], alone)
    assert first_step(run.spares[0], 1) > 2
