"""Look after the neighbours of a worker: one that is away for too long is lost, and a standby of the roster gets its place.

Every neighbour of a lost worker does this by itself. All ask in the same order, and a standby takes one place only, so they arrive at the
same one. A worker whose own place a standby has taken, because the others had lost it, finds that out here and ends.
"""

from __future__ import annotations

import sys
from pathlib import Path

from thinwire.cluster.neighbours import Neighbours
from thinwire.cluster.places import PLACES_FILE, keep_places
from thinwire.cluster.standby import Answer, StandbyClient
from thinwire.config.sections import RunConfig
from thinwire.link.errors import Abort, LinkError, Replaced
from thinwire.link.link import Link
from thinwire.link.peer import Worker, WorkerId
from thinwire.link.roster import Roster
from thinwire.util.disk import shortage, warn

LOOK_SECONDS = 1.0
"""Time between two looks at the links."""


def check_standbys(config: RunConfig, roster: Roster) -> None:
    """Refuse standbys that would never be asked, or could not take a place."""
    link = config.link
    if roster.standbys and config.pipeline.stages == 1:
        raise ValueError(
            "the roster lists standbys, but with pipeline.stages 1 no neighbour keeps copies of a machine's checkpoints for them; "
            "cut the model into 2 stages or more, or leave the standbys out"
        )
    if roster.standbys and link.standby_seconds >= link.reconnect_seconds:
        raise ValueError(
            f"link.standby_seconds is {link.standby_seconds}, link.reconnect_seconds {link.reconnect_seconds}: the run would be given up "
            "before a standby is asked to help; choose a smaller --link.standby_seconds or a larger --link.reconnect_seconds"
        )


class Watch:
    """Find lost neighbours and who takes their places; without standbys it does nothing."""

    def __init__(self, neighbours: Neighbours, config: RunConfig, run: Path) -> None:
        self.neighbours, self.run = neighbours, run
        self.me = neighbours.roster.standby(neighbours.endpoint.identity.certificate)
        listed = self.me.id if self.me else neighbours.worker_id
        self.client = StandbyClient(neighbours.roster, neighbours.endpoint, listed, config)
        self.limit = config.link.standby_seconds
        self.runtime = neighbours.endpoint.runtime
        self.lock = self.runtime.lock()
        self.found: dict[WorkerId, Worker] = {}
        """Standbys whose places are still to be theirs in the roster, in the next epoch."""
        self.given: set[WorkerId] = set()
        """Places that a standby took while this process was there."""
        self.replaced: Replaced | None = None
        self.answers: list[Answer] = []
        """What standbys said when no one of them took the place of a worker that is away."""
        self.over = self.runtime.event()

    def start(self) -> None:
        """Find out who has taken a place so far, this one included; then look after the neighbours."""
        if not self.neighbours.roster.standbys:
            return
        answers = self.client.ask_all()
        self._refuse_second(answers, anyone=True)
        self.found = {
            answer.worker_id: answer.standby for answer in reversed(answers) if answer.worker_id in self.neighbours.roster.workers
        }
        self.settle()
        self.runtime.thread("thinwire-watch", self._look).start()

    def end(self) -> None:
        """Ask no more."""
        self.over.set()

    def settle(self) -> None:
        """Between two epochs: give standbys the places they have taken; raise if this worker's own place is another's."""
        if replaced := self.replaced or self.neighbours.replaced:
            raise replaced
        with self.lock:
            found, self.found = self.found, {}
        roster = self.neighbours.roster
        for worker_id, standby in found.items():
            if roster.worker(worker_id).certificate != standby.certificate:
                roster = roster.taken_by(worker_id, standby)
        if roster != self.neighbours.roster:
            self.neighbours.roster = roster
            try:
                keep_places(roster, self.run)
            except OSError as error:  # a worker that is started again asks the standbys
                warn(f"{self.run / PLACES_FILE} was not written: {shortage(self.run / PLACES_FILE, error)}. Training goes on")

    def explained(self, error: LinkError) -> LinkError:
        """Return why a link failed, with what the standbys know about it."""
        if not self.neighbours.roster.standbys or type(error) is not LinkError:
            return error
        try:
            self._refuse_second(self.client.ask_all(), anyone=True)
        except Replaced as replaced:
            return replaced
        if not self.answers:
            return error
        said = "; ".join(map(str, self.answers))
        return LinkError(
            f"{error.reason}. No standby took its place ({said}): start one, `thinwire join ROSTER --standby`, or the lost worker again, "
            "and go on with --resume on every machine"
        )

    def _look(self) -> None:
        """Look at the links now and then, for as long as the worker trains."""
        while not self.over.wait(min(LOOK_SECONDS, self.limit / 4)):
            links = list(self.neighbours.opened.values())
            if self.neighbours.ending:  # the stages agree on the last step, and then end
                return
            for link in links:
                if link.peer in self.found:  # made before that was known
                    link.abort(f"another worker has the place of {link.peer}", Abort.RECOVERING)
                elif link.absent_seconds > self.limit or link.refused:
                    self._replace(link)
            if not any(link.absent_seconds > self.limit for link in links):
                self.answers = []

    def _replace(self, link: Link) -> None:
        """Find who takes the place at the other end of a link, and give up the epoch if it is another worker."""
        try:
            standby = self._find(link)
        except Replaced as error:
            self.replaced = error
            link.abort(str(error), Abort.RECOVERING)
            return
        if standby is None or standby.certificate == self.neighbours.roster.worker(link.peer).certificate:
            return
        text = f"{standby.id} at {standby.address} takes the place of {link.peer}, which is away"
        print(f"thinwire: note: {text}", file=sys.stderr, flush=True)
        self.given.add(link.peer)
        with self.lock:
            self.found[link.peer] = standby
        link.abort(text, Abort.RECOVERING)

    def _find(self, link: Link) -> Worker | None:
        """Return the standby that has the place at the other end, or takes it now; None: nobody."""
        worker_id, answers = link.peer, self.client.ask_all()
        self._refuse_second(answers)
        seen = link.newest is not None or worker_id in self.given  # a worker that was never seen here is late, not lost
        if seen and not any(answer.worker_id == worker_id for answer in answers):
            for number, answer in enumerate(answers):
                if answer.problem is None and answer.worker_id is None and link.absent_seconds > self.limit:
                    answers[number] = self.client.ask(answer.standby, "take", worker_id)
                    self._refuse_second([answers[number]])
                    if answers[number].worker_id == worker_id:
                        break
        self.answers = answers
        return next((answer.standby for answer in answers if answer.worker_id == worker_id), None)

    def _refuse_second(self, answers: list[Answer], *, anyone: bool = False) -> None:
        """Raise Replaced if another has this worker's own place.

        Of two standbys that have it, because not everyone reached the first, only the later one ends; at its start a worker yields to
        `anyone` who is there already.
        """
        for answer in answers:
            earlier = anyone or self.me is None or answer.standby.id < self.me.id
            if answer.worker_id == self.neighbours.worker_id and earlier:
                raise Replaced(
                    f"{answer.standby.id} at {answer.standby.address} has taken the place of this worker, {answer.worker_id}, while others "
                    "could not reach it; a place has one worker: leave this one off, or let it stand by in the next roster"
                )
