"""Look after the neighbours of a worker: one that is away for too long is lost, and a standby of the roster gets its worker id.

Every neighbour of a lost worker does this by itself. All ask in the same order, and a standby takes one worker id only, so they arrive at
the same one. A worker whose own id a standby has taken, because the others had lost it, finds that out here and ends.
"""

from __future__ import annotations

from thinwire.cluster.neighbours import Neighbours
from thinwire.cluster.standby import Answer, StandbyClient
from thinwire.config.sections import RunConfig
from thinwire.link.errors import Abort, LinkError, Replaced
from thinwire.link.link import Link
from thinwire.link.peer import Worker
from thinwire.link.roster import Roster
from thinwire.util.notices import note

LOOK_SECONDS = 1.0
"""Time between two looks at the links."""


def check_standbys(config: RunConfig, roster: Roster) -> None:
    """Refuse standbys that would never be asked, or could not take a worker id."""
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
    """Find lost neighbours and who replaces them; without standbys it does nothing."""

    def __init__(self, neighbours: Neighbours, config: RunConfig) -> None:
        self.neighbours, self.places = neighbours, neighbours.places
        roster = self.places.roster
        self.me = roster.standby(neighbours.endpoint.identity.certificate)
        listed = self.me.id if self.me else neighbours.worker_id
        self.client = StandbyClient(roster, neighbours.endpoint, listed, config)
        self.limit, self.runtime = config.link.standby_seconds, neighbours.endpoint.runtime
        self.replaced: Replaced | None = None
        self.answers: list[Answer] = []
        """What standbys said when no one of them replaced a worker that is away."""
        self.over = self.runtime.event()

    def start(self) -> None:
        """Find out what standbys hold so far, perhaps the id of this worker; then look after the neighbours."""
        if not self.places.roster.standbys:
            return
        answers = self.client.ask_all()
        self._refuse_second(answers, anyone=True)
        for answer in reversed(answers):
            if answer.worker_id is not None and answer.worker_id in self.places.roster.workers:
                self.places.expect(answer.worker_id, answer.standby)
        self.settle()
        self.runtime.thread("thinwire-watch", self._look).start()

    def end(self) -> None:
        """Ask no more."""
        self.over.set()

    def settle(self) -> None:
        """Between two epochs: let standbys hold what they have taken; raise if another holds this worker's own id."""
        if replaced := self.replaced or self.neighbours.replaced:
            raise replaced
        self.places.begin_epoch()

    def explained(self, error: LinkError) -> LinkError:
        """Return why a link failed, with what the standbys know about it."""
        if not self.places.roster.standbys or type(error) is not LinkError:
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
                if self.places.changes(link.peer):  # made before that was known
                    link.abort(f"another worker takes the place of {link.peer}", Abort.RECOVERING)
                elif link.absent_seconds > self.limit or link.refused:
                    self._replace(link)
            if not any(link.absent_seconds > self.limit for link in links):
                self.answers = []

    def _replace(self, link: Link) -> None:
        """Find who replaces the worker at the other end of a link, and give up the epoch if there is one."""
        try:
            standby = self._find(link)
        except Replaced as error:
            self.replaced = error
            link.abort(str(error), Abort.RECOVERING)
            return
        if standby is None or standby.certificate == self.places.worker(link.peer).certificate:
            return
        text = f"{standby.id} at {standby.address} takes the place of {link.peer}, which is away"
        note(text)
        self.places.expect(link.peer, standby, replaced=True)
        link.abort(text, Abort.RECOVERING)

    def _find(self, link: Link) -> Worker | None:
        """Return the standby that holds the worker id at the other end, or takes it now; None: nobody."""
        worker_id, answers = link.peer, self.client.ask_all()
        self._refuse_second(answers)
        seen = link.newest is not None or self.places.was_replaced(worker_id)  # a worker that was never seen here is late, not lost
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
        """Raise Replaced if another holds this worker's own id.

        Of two standbys that hold it, because not everyone reached the first, only the later one ends; at its start a worker yields to
        `anyone` who is there already.
        """
        for answer in answers:
            earlier = anyone or self.me is None or answer.standby.id < self.me.id
            if answer.worker_id == self.neighbours.worker_id and earlier:
                raise Replaced(
                    f"{answer.standby.id} at {answer.standby.address} has taken the place of this worker, {answer.worker_id}, while others "
                    "could not reach it; a worker id has one holder: leave this one off, or let it stand by in the next roster"
                )
