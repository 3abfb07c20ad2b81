"""What workers ask standbys, and the server with which a standby answers: it takes one worker id, once, and then says which for good.

One question and one answer over a link of its own, in a run name of its own; the listener hands it to the server and never to a link of
training. Only members of the roster can ask, and only its standbys can answer: both prove who they are. When to ask is `watch.py`'s job.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from thinwire.cluster.places import Places
from thinwire.config.sections import RunConfig
from thinwire.config.toml import shared_settings
from thinwire.link.contract import Contract
from thinwire.link.endpoint import Endpoint
from thinwire.link.errors import LinkClosed, LinkError, ProtocolError
from thinwire.link.frame import Channel, Frame, Kind
from thinwire.link.hello import Terms
from thinwire.link.link import Link
from thinwire.link.listener import Listener
from thinwire.link.message import decode_message
from thinwire.link.options import SERVICES, LinkOptions
from thinwire.link.peer import Worker, WorkerId
from thinwire.link.roster import Roster
from thinwire.link.transport import ByteStream
from thinwire.run.stop import Stop
from thinwire.util.notices import note

(SERVICE,) = SERVICES
ASK_SECONDS = 5.0
"""How long a standby may take to be reached, and again to answer."""
CONTRACT = Contract(limits={Kind.STEP: 512, Kind.BASIS: 0, Kind.SNAPSHOT: 0, Kind.VOTE: 0})
"""One short message each way."""
OPTIONS = LinkOptions(reconnect_seconds=ASK_SECONDS, close_seconds=1.0)
MOST_ASKERS = 16
"""Questions answered at once; who comes beyond them asks again."""
POLL_SECONDS = 0.1
Question = Literal["which", "take", "over"]
"""Which worker id do you hold? Take this one, if you hold none. The run is over."""


@dataclass(frozen=True)
class Answer:
    """What one standby said."""

    standby: Worker
    worker_id: WorkerId | None = None
    """The one it holds; None: none, or it did not say."""
    problem: str | None = None
    """Why it did not answer."""

    def __str__(self) -> str:
        said = self.problem or (f"it holds {self.worker_id}" if self.worker_id else "it replaces nobody yet")
        return f"{self.standby.id} at {self.standby.address}: {said}"


@dataclass(frozen=True)
class StandbyClient:
    """Ask standbys, as one member of the roster."""

    roster: Roster
    endpoint: Endpoint
    worker_id: WorkerId
    """Where the roster's file lists this member."""
    config: RunConfig

    @property
    def terms(self) -> Terms:
        return Terms(run_for_standbys(self.roster), shared_settings(self.config), self.worker_id)

    def ask(self, standby: Worker, word: Question, worker_id: WorkerId | None = None) -> Answer:
        """Ask one standby."""
        link = Link.connect(standby, self.endpoint, self.terms, CONTRACT, options=OPTIONS, service=SERVICE)
        try:
            link.wait_open(2 * ASK_SECONDS)  # longer than the link's own limit, which gives the better reason
            say(link, {"word": word, "place": to_pair(worker_id)})
            return Answer(standby, worker_id_in(hear(link)))
        except (LinkError, TimeoutError) as error:
            return Answer(standby, problem=str(error))
        finally:
            link.close()

    def ask_all(self, word: Question = "which") -> list[Answer]:
        """Ask all standbys but this one at the same time; return what they said, in the order of the roster."""
        others = [standby for standby in self.roster.standbys if standby.id != self.worker_id]
        return self.endpoint.runtime.together([partial(self.ask, standby, word) for standby in others])


class StandbyServer:
    """The side of a standby: its listener, who may ask, and the one worker id it takes."""

    def __init__(self, places: Places, endpoint: Endpoint, config: RunConfig, listen: str | None = None) -> None:
        """Find this machine among the roster's standbys; a worker id that cannot be written down is not taken."""
        identity, self.endpoint, self.runtime, roster = endpoint.identity, endpoint, endpoint.runtime, places.roster
        me = roster.standby(identity.certificate)
        if me is None:
            raise ValueError(
                f"the roster lists no standby with the certificate {identity.certificate_path}; add it: "
                "`thinwire roster FILE --stage ... --standby ADDRESS=CERTIFICATE`"
            )
        self.me, self.places = me, places
        self.terms = Terms(run_for_standbys(roster), shared_settings(config), me.id)
        self.worker_ids = frozenset(roster.workers)
        self.over = False
        """Whether the run has ended without this standby."""
        self.leaving = False
        """Whether it is too late to take a worker id."""
        self.problem = ""
        """What was last told of a question that could not be answered."""
        self.lock, self.changed = self.runtime.lock(), self.runtime.event()
        self.free = threading.Semaphore(MOST_ASKERS)
        self.clients = (*roster.workers.values(), *(other for other in roster.standbys if other is not me))
        assert me.address is not None
        self.address = listen or me.address

    def open(self) -> StandbyServer:
        """Listen, and answer from now on."""
        self.listener = Listener(self.address, self.endpoint, (), OPTIONS, self.clients)
        self.listener.services[SERVICE] = self._receive
        return self

    @property
    def worker_id(self) -> WorkerId | None:
        """Return the worker id that this standby holds."""
        return self.places.held_by(self.me)

    def wait(self, stop: Stop) -> WorkerId | None:
        """Return the worker id to take, once it is known; None: the run is over, or this process is to end."""
        with stop.listening():
            while self.worker_id is None and not self.over and not stop.asked:
                self.changed.wait(POLL_SECONDS)
        with self.lock:
            self.leaving = self.worker_id is None
            return self.worker_id

    def close(self) -> None:
        """Answer no more."""
        self.listener.close()

    def _receive(self, client: WorkerId, stream: ByteStream) -> None:
        """Take a connection from the listener, which must not wait."""
        if self.free.acquire(blocking=False):
            self.runtime.thread("thinwire-standby", partial(self._serve, client, stream)).start()
        else:
            stream.end("close")

    def _serve(self, client: WorkerId, stream: ByteStream) -> None:
        """Answer one question."""
        link = Link.accept(self.listener, stream, Worker(client, ""), self.terms, CONTRACT, options=OPTIONS)
        try:
            link.wait_open(ASK_SECONDS)
            say(link, {"place": to_pair(self._answer(hear(link)))})
        except LinkClosed:
            pass  # it has gone, and will ask again if it has to
        except LinkError as error:  # such as settings that differ: the person at this machine should know before it matters
            self._tell(f"cannot answer {client}: {error}")
            link.abort(str(error), error.code)
        except TimeoutError:
            pass
        finally:
            link.close()
            self.free.release()

    def _answer(self, question: dict[str, Any]) -> WorkerId | None:
        """Take a question in; return the worker id that this standby holds."""
        word, worker_id = question.get("word"), worker_id_in(question)
        if word not in ("which", "take", "over") or (word == "take") != (worker_id in self.worker_ids):
            raise ProtocolError("question", question, "which, take with a worker id of the roster, or over")
        with self.lock:
            if self.worker_id is None and word == "take" and not self.leaving:
                assert worker_id is not None
                try:
                    self.places.take(worker_id, self.me)
                except ValueError as error:
                    self._tell(f"cannot take the place of {worker_id}: {error}")
                    return None
            self.over = self.over or (word == "over" and self.worker_id is None)
            if self.worker_id is not None or self.over:
                self.changed.set()
            return self.worker_id

    def _tell(self, problem: str) -> None:
        """Let the person at this machine know, once."""
        if problem != self.problem:
            self.problem = problem
            note(problem)


def run_for_standbys(roster: Roster) -> str:
    """Name the run in which standbys are asked."""
    return f"standby-{roster.run_name}"


def say(link: Link, message: dict[str, Any]) -> None:
    """Send one message."""
    link.send(Frame.make(Kind.STEP, json.dumps(message).encode(), epoch=link.epoch))


def hear(link: Link) -> dict[str, Any]:
    """Receive one message."""
    frame = link.receive(Channel.CONTROL, ASK_SECONDS)
    return decode_message(frame.payload)


def to_pair(worker_id: WorkerId | None) -> list[int] | None:
    """Write a worker id."""
    return None if worker_id is None else [worker_id.replica, worker_id.stage]


def worker_id_in(message: dict[str, Any]) -> WorkerId | None:
    """Read the worker id in a message, which calls it a place; there may be none."""
    pair = message.get("place")
    if pair is None:
        return None
    if not isinstance(pair, list) or len(pair) != 2 or any(type(number) is not int or not 0 <= number < 2**32 for number in pair):
        raise ProtocolError("worker id", pair, "a replica and a stage")
    return WorkerId(*pair)
