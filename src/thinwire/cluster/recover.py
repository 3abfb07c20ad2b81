"""Train one stage among its neighbours, through whatever happens to them: never a wrong step (docs/reliability.md).

A lost connection is the link's affair. When a worker is lost, its neighbours find out as soon as another process takes its place, and
pass it on along the chain: everyone abandons the step under way, makes new links in a later epoch, votes for the newest checkpoint that
all stages have, restores it and goes on from there. Steps are replayed with the same samples, so the weights are those of an undisturbed
run, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from thinwire.cluster.ending import end_together, kept_step
from thinwire.cluster.membership import Membership
from thinwire.cluster.neighbours import Neighbours
from thinwire.cluster.observe import Observer
from thinwire.cluster.opening import Make, Opened, open_stage
from thinwire.cluster.standby import StandbyServer
from thinwire.cluster.watch import Watch
from thinwire.cluster.watchdog import Watchdog
from thinwire.data.open import Data
from thinwire.link.errors import Abort, Interrupted, LinkError, Stopping
from thinwire.metrics.news import Report, ignore
from thinwire.metrics.track import Tracker
from thinwire.pipeline.backend import close_group
from thinwire.pipeline.worker import UNKNOWN, Known, WorkerPipeline
from thinwire.run.agree import Start, agree
from thinwire.run.stop import Stop
from thinwire.run.trainer import Trainer
from thinwire.util.notices import note, say_aloud

BACKOFF_SECONDS = 0.05
BACKOFF_LIMIT_SECONDS = 1.0
"""First and longest pause between attempts that commit no step."""


@dataclass
class Recovery:
    """One worker's way through the epochs of a run: what stays, and what one epoch leaves for the next."""

    member: Membership
    run: Path
    neighbours: Neighbours
    trackers: Sequence[Tracker]
    stop: Stop
    report: Report
    copies: bool
    """Whether neighbours keep each other's checkpoints."""
    start: Start
    known: Known | None
    """What the epoch before found out."""
    make: Make = WorkerPipeline
    """What computes the stage."""
    epoch: int = 0
    step: int = 0
    """Steps committed when the last epoch ended."""
    failures: int = 0
    """Epochs in a row that committed no step."""


def train_stage(
    member: Membership,
    run: Path,
    *,
    resume: bool = False,
    replacing: bool = False,
    copies: bool = False,
    trackers: Sequence[Tracker] = (),
    stop: Stop | None = None,
    report: Report = ignore,
    stuck: Callable[[str], None] = lambda why: say_last(why),
    server: StandbyServer | None = None,
    make: Make = WorkerPipeline,
    data: Data | None = None,
) -> dict[str, Any]:
    """Train one stage in step with the others of the roster; return the run's summary.

    `replacing`: this process takes the place of one that was lost. `copies`: neighbours keep each other's checkpoints, for stages that
    are on different machines. `report` takes what people should know (news.py), `stuck` why this process ends itself. `server`: where a
    standby that holds this worker id goes on to answer. `make`: what computes the stage. `data`: opened already, where this is a first
    stage.
    """
    config, stop, neighbours = member.config, stop or Stop(), member.neighbours("train")
    torch.set_num_threads(config.train.threads or torch.get_num_threads())
    if server is not None:
        neighbours.listener, neighbours.others = server.listener, server.clients
    neighbours.report = report
    start = Start(resume=resume, recovering=replacing, data=data)
    recovery = Recovery(member, run, neighbours, trackers, stop, report, copies, start, Known(UNKNOWN) if replacing else None, make)
    watch, watchdog = Watch(neighbours, config), Watchdog(neighbours, stop, config.train.stuck_seconds, stuck)
    observer = Observer(neighbours, config.link.reconnect_seconds, report if copies else ignore)
    with looking_after(neighbours, watch, observer), stop.listening(), watchdog:
        watch.start()
        observer.start()
        while isinstance(outcome := run_epoch(recovery, watchdog), Interrupted):
            prepare_next(recovery, outcome)
            watch.settle()
            member.runtime.sleep(member.runtime.uniform(0.5, 1.0) * pause(recovery.failures))
        return outcome


@contextmanager
def looking_after(neighbours: Neighbours, watch: Watch, observer: Observer) -> Iterator[None]:
    """Whatever ends this worker, tell its neighbours what that means for them, and end all threads."""
    try:
        yield
    except LinkError as error:
        raise watch.explained(error) from None
    except ValueError as error:  # this worker cannot go on, and so nobody can: the others are told why
        neighbours.drop(LinkError(f"{neighbours.worker_id}: {error}"))
        raise
    except BaseException as error:  # this process ends, the run need not: whoever takes its place finds the others ready
        text = f"{neighbours.worker_id} has ended ({type(error).__name__}{f': {error}' if str(error) else ''})"
        neighbours.drop(Interrupted(text, code=Abort.ENDED))
        raise
    finally:
        observer.end()
        watch.end()
        neighbours.close()


def run_epoch(recovery: Recovery, watchdog: Watchdog) -> dict[str, Any] | Interrupted:
    """Train until the end, and return the summary, or until a worker is lost, and return why. Nothing of the epoch outlives it."""
    neighbours, config = recovery.neighbours, recovery.member.config
    opened: Opened | None = None
    trainer: Trainer | None = None
    try:
        with recovery.stop.abandoning(neighbours.interrupt):
            copies = recovery.run if recovery.copies else None
            opened = open_stage(config, neighbours, epoch=recovery.epoch, known=recovery.known, copies=copies, make=recovery.make)
            trainer = make_ready(recovery, opened)
            working, compute = trainer, opened.compute
            watchdog.follow(lambda: (working.doing, working.position.step, compute.runs), compute.timing.turn_seconds)
        return trainer.run()
    except (Interrupted, Stopping) as error:
        let_go(neighbours, opened, error)
        return end_epoch(recovery, trainer, error)
    except ValueError as error:
        if trainer is None:  # this process refuses to start: the others go on with one that does not
            let_go(neighbours, opened, Interrupted(f"{neighbours.worker_id} refused to start: {error}", code=Abort.REFUSED))
        raise
    finally:
        watchdog.follow(None)
        close_group()


def make_ready(recovery: Recovery, opened: Opened) -> Trainer:
    """Agree with all others on where the run goes on; return what trains from there."""
    member = recovery.member
    recovery.known = Known(opened.compute.timing, opened.compute.boundaries)
    if recovery.start.recovering:  # the neighbours have met this process: whoever comes after it must have a larger number
        member.places.keep()
    trainer = Trainer(
        member.config,
        recovery.run,
        opened.compute,
        opened.group,
        backups=opened.backups,
        trackers=recovery.trackers,
        stop=recovery.stop,
        report=recovery.report,
        runtime=member.runtime,
    )
    agree(trainer, recovery.start)
    member.places.keep()
    begun, again = trainer.position.step, max(0, recovery.step - trainer.position.step)
    recovered = {"restored": begun, "epoch": recovery.epoch, "again": again}
    recovery.report(recovered if recovery.start.recovering else {"begun": begun})
    return trainer


def let_go(neighbours: Neighbours, opened: Opened | None, reason: LinkError) -> None:
    """End the links of an epoch, and what waits for them."""
    neighbours.drop(reason)
    if opened is not None:
        opened.close()


def end_epoch(recovery: Recovery, trainer: Trainer | None, error: Interrupted | Stopping) -> dict[str, Any] | Interrupted:
    """Keep what the next epoch needs, and return why this one has ended; or end the run, and return its summary."""
    recovery.failures += 1
    if trainer is not None:
        keeper, start = trainer.keeper, recovery.start
        recovery.failures = 0 if trainer.position.step > trainer.started_at.step else recovery.failures
        recovery.step, start.earlier, start.confirmed = trainer.position.step, keeper.saver, max(start.confirmed, keeper.confirmed)
    if isinstance(error, Interrupted) and not recovery.stop.now:
        return error.with_traceback(None)  # its frames would keep the stage of this epoch alive
    recovery.report({"ending": error.reason})  # a neighbour that was lost is not waited for any more
    if trainer is None:
        return {"steps": kept_step(recovery.run, recovery.member.stage), "val_loss": None}
    return end_together(trainer, recovery.neighbours, recovery.epoch + 1)


def prepare_next(recovery: Recovery, reason: Interrupted) -> None:
    """Say why an epoch has ended, and count on."""
    told = {"abandoned": recovery.step, "epoch": recovery.epoch, "why": reason.reason, "fruitless": recovery.failures > 0}
    recovery.report(told)
    if recovery.copies and reason.code is Abort.REFUSED:  # else its supervisor says so
        limit = recovery.member.config.link.reconnect_seconds
        note(f"{reason.reason}; waiting {limit:.0f} s for it to be started again")
    recovery.epoch, recovery.start.recovering = max(recovery.epoch + 1, reason.epoch), True


def pause(failures: int) -> float:
    """Return how long to wait after so many epochs in a row that committed no step: nothing at first."""
    return min(BACKOFF_LIMIT_SECONDS, BACKOFF_SECONDS * 2 ** (failures - 1)) if failures else 0.0


def say_last(why: str) -> None:
    """Tell people why this process ends itself."""
    say_aloud(f"thinwire: error: {why}; start it again with --resume")
