"""Who finds a standby for a lost neighbour, and who finds out that it was itself replaced."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from jobs import local_roster, run_config
from thinwire.cluster.places import Places, read_places
from thinwire.cluster.standby import Answer
from thinwire.cluster.watch import Watch, check_standbys
from thinwire.config.sections import LinkConfig, PipelineConfig, RunConfig
from thinwire.link.endpoint import Endpoint
from thinwire.link.errors import Abort, LinkError, Replaced
from thinwire.link.peer import Worker, WorkerId
from thinwire.link.roster import Roster

CONFIG = run_config(3, "auto", {"name": "dense"})
FIRST, MIDDLE, LAST = (WorkerId(0, stage) for stage in range(3))


@pytest.fixture
def roster(identities) -> Roster:
    return local_roster(identities, 3, standbys=2)


class FakeLink:
    """A link whose peer is away, and what it was aborted with."""

    def __init__(self, peer: WorkerId, *, seen: bool = True) -> None:
        self.peer, self.newest, self.absent_seconds, self.reason = peer, 5 if seen else None, 99.0, ""
        self.code = Abort.LOST

    def abort(self, reason: str, code: Abort) -> None:
        self.reason, self.code = reason, code


class FakeClient:
    """Standbys that have these places; None: free, a text: why it cannot be reached."""

    def __init__(self, roster: Roster, has: list[WorkerId | str | None]) -> None:
        self.has = dict(zip(roster.standbys, has, strict=True))
        self.asked: list[int] = []

    def ask(self, standby: Worker, word: str, worker_id: WorkerId) -> Answer:
        assert word == "take"
        self.asked.append(standby.id.stage)
        self.has[standby] = self.has[standby] or worker_id
        return Answer(standby, self.has[standby])

    def ask_all(self) -> list[Answer]:
        return [Answer(key, problem=has) if isinstance(has, str) else Answer(key, has) for key, has in self.has.items()]


def watch_of(roster: Roster, identities, tmp_path, has: list, member: int = 0, worker_id: WorkerId = FIRST) -> Watch:
    places = Places(roster, tmp_path / "run")
    neighbours = SimpleNamespace(places=places, endpoint=Endpoint(identities[member]), worker_id=worker_id, opened={}, replaced=None)
    watch = Watch(neighbours, CONFIG)
    watch.client = FakeClient(roster, has)
    return watch


@pytest.mark.parametrize(
    "has, asked, chosen",
    [
        ([None, None], [0], 0),
        ([LAST, None], [1], 1),
        (["no connection", None], [1], 1),
        ([None, MIDDLE], [], 1),
        ([LAST, "no connection"], [], None),
    ],
)
def test_standbys_are_asked_in_their_order(roster, identities, tmp_path, has, asked, chosen, capsys):
    watch = watch_of(roster, identities, tmp_path, has)
    link = FakeLink(MIDDLE)
    watch._replace(link)
    watch.settle()
    assert watch.client.asked == asked
    if chosen is None:
        assert not link.reason and watch.places.worker(MIDDLE) == roster.workers[MIDDLE] and not (tmp_path / "run").exists()
        explained = str(watch.explained(LinkError("no connection to replica 0 stage 1 for 60 s")))
        assert "standby 0 at 127.0.0.1" in explained and "it holds replica 0 stage 2" in explained and "start one" in explained
        return
    assert link.code is Abort.RECOVERING
    assert watch.places.worker(MIDDLE).address == roster.standbys[chosen].address
    assert read_places(roster, tmp_path / "run").worker(MIDDLE) == watch.places.worker(MIDDLE)
    assert f"standby {chosen} at" in capsys.readouterr().err


def test_one_who_is_late_is_not_replaced_but_found_where_it_is(roster, identities, tmp_path):
    watch = watch_of(roster, identities, tmp_path, [None, None])
    watch._replace(FakeLink(MIDDLE, seen=False))
    assert not watch.client.asked and not watch.places.changes(MIDDLE)
    watch = watch_of(roster, identities, tmp_path, [None, MIDDLE])
    watch._replace(FakeLink(MIDDLE, seen=False))
    assert not watch.client.asked and watch.places.changes(MIDDLE)
    watch.settle()
    assert watch.places.worker(MIDDLE).certificate == roster.standbys[1].certificate


def test_a_peer_that_comes_back_before_anyone_took_its_place_keeps_it(roster, identities, tmp_path):
    watch = watch_of(roster, identities, tmp_path, [None, None])
    link = FakeLink(MIDDLE)
    link.absent_seconds = 0.0
    watch._replace(link)
    assert not watch.client.asked and not link.reason


def test_one_whose_place_was_taken_ends_and_tells_nobody_else_so(roster, identities, tmp_path):
    watch = watch_of(roster, identities, tmp_path, [FIRST, None])
    link = FakeLink(MIDDLE)
    watch._replace(link)
    assert not watch.client.asked and link.code is Abort.RECOVERING  # the peer is not replaced
    with pytest.raises(Replaced, match=r"standby 0 at .* has taken the place of this worker, replica 0 stage 0"):
        watch.settle()
    with pytest.raises(Replaced):
        watch.start()
    assert isinstance(watch.explained(LinkError("refused this worker")), Replaced)


def test_of_two_standbys_with_one_place_the_later_ends(roster, identities, tmp_path):
    earlier = watch_of(roster, identities, tmp_path, ["itself", MIDDLE], member=3, worker_id=MIDDLE)
    earlier._replace(FakeLink(LAST))
    earlier.settle()
    later = watch_of(roster, identities, tmp_path, [MIDDLE, "itself"], member=4, worker_id=MIDDLE)
    later._replace(FakeLink(LAST))
    with pytest.raises(Replaced):
        later.settle()


def test_without_standbys_nothing_is_watched(roster, identities, tmp_path):
    watch = watch_of(replace(roster, standbys=()), identities, tmp_path, [])
    watch.start()
    watch.settle()
    error = LinkError("no connection")
    assert watch.explained(error) is error


def test_times_with_which_nobody_would_be_asked_are_refused(roster):
    check_standbys(RunConfig(link=LinkConfig(reconnect_seconds=20.0)), replace(roster, standbys=()))
    with pytest.raises(ValueError, match=r"link.standby_seconds is 30.0, link.reconnect_seconds 20.0.*choose a smaller"):
        check_standbys(RunConfig(link=LinkConfig(reconnect_seconds=20.0)), roster)
    with pytest.raises(ValueError, match=r"pipeline.stages 1 no neighbour keeps copies"):
        check_standbys(RunConfig(pipeline=PipelineConfig(stages=1)), roster)
