"""Train one stage among its neighbours, through whatever happens to them: never a wrong step (docs/reliability.md).

A lost connection is the link's affair. When a worker is lost, its neighbours find out as soon as another process takes its place, and
pass it on along the chain: everyone abandons the step under way, makes new links in a later epoch, votes for the newest checkpoint that
all stages have, restores it and goes on from there. Steps are replayed with the same samples, so the weights are those of an undisturbed
run, bit for bit.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from thinwire import checkpoint
from thinwire.checkpoint.manifest import whole_manifest
from thinwire.cluster.membership import Membership, remember
from thinwire.cluster.observe import Observer
from thinwire.cluster.standby import StandbyServer
from thinwire.cluster.watch import Watch
from thinwire.cluster.watchdog import Watchdog
from thinwire.data.open import Data
from thinwire.link.contract import Contract
from thinwire.link.errors import Abort, Interrupted, LinkError, Stopping
from thinwire.link.frame import Kind
from thinwire.metrics.news import Report, ignore
from thinwire.metrics.track import Tracker
from thinwire.pipeline import forms
from thinwire.pipeline.backend import MESSAGE_BYTES, close_group
from thinwire.pipeline.control import decode_outcome
from thinwire.pipeline.device import choose_device
from thinwire.pipeline.neighbours import Neighbours
from thinwire.pipeline.outcome import Outcome, of_replica
from thinwire.pipeline.replica_links import join_control
from thinwire.pipeline.worker import UNKNOWN, WorkerPipeline
from thinwire.replicas.graph import make_graph
from thinwire.run.stop import Stop
from thinwire.run.trainer import Trainer

if TYPE_CHECKING:
    from thinwire.memory.blocks import Profile

AGREE_SECONDS = 3.0
"""How long a stage that ends waits for its neighbours to agree on the last step."""
BACKOFF_SECONDS = 0.05
BACKOFF_LIMIT_SECONDS = 1.0
"""First and longest pause between attempts that commit no step."""


@dataclass
class Recovery:
    """What a worker keeps from one epoch to the next."""

    recovering: bool
    copies: Path | None
    epoch: int = 0
    timing: Outcome | None = None
    profiles: Sequence[Profile] = ()
    """What the memory plan was made from, with a budget."""
    data: Data | None = None
    saver: checkpoint.Saver | None = None
    """Of the epoch before; it may still be writing."""
    confirmed: int = -1
    """Newest step of which all stages are known to have had a checkpoint."""
    step: int = 0
    """Steps committed when the epoch ended."""
    failures: int = 0
    """Epochs in a row that committed no step."""
    since: float = field(default_factory=time.monotonic)


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
) -> dict[str, Any]:
    """Train one stage in step with the others of the roster; return the run's summary.

    `replacing`: this process takes the place of one that was lost. `copies`: neighbours keep each other's checkpoints, for stages that
    are on different machines. `report` takes what people should know (news.py), `stuck` why this process ends itself. `server`: where a
    standby that has taken this place goes on to answer.
    """
    torch.set_num_threads(member.config.train.threads or torch.get_num_threads())
    neighbours = member.neighbours("train", run)
    if server is not None:
        neighbours.listener, neighbours.others = server.listener, server.clients
    neighbours.report = report
    stop = stop or Stop()
    watch, watchdog = Watch(neighbours, member.config, run), Watchdog(neighbours, stop, member.config.train.stuck_seconds, stuck)
    observer = Observer(neighbours, member.config.link.reconnect_seconds, report if copies else ignore)
    kept = Recovery(recovering=replacing, timing=UNKNOWN if replacing else None, copies=run if copies else None)
    try:
        with stop.listening(), watchdog:
            watch.start()
            observer.start()
            while True:
                outcome = run_epoch(member, run, neighbours, kept, report, resume=resume, trackers=trackers, stop=stop, watchdog=watchdog)
                if isinstance(outcome, dict):
                    return outcome
                report({"abandoned": kept.step, "epoch": kept.epoch, "why": outcome.reason, "fruitless": kept.failures > 0})
                if copies and outcome.code is Abort.REFUSED:  # else its supervisor says so
                    limit = member.config.link.reconnect_seconds
                    print(
                        f"thinwire: note: {outcome.reason}; waiting {limit:.0f} s for it to be started again", file=sys.stderr, flush=True
                    )
                kept.epoch, kept.recovering = max(kept.epoch + 1, outcome.epoch), True
                watch.settle()
                time.sleep(random.uniform(0.5, 1.0) * pause(kept.failures))
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


def pause(failures: int) -> float:
    """Return how long to wait after so many epochs in a row that committed no step: nothing at first."""
    return min(BACKOFF_LIMIT_SECONDS, BACKOFF_SECONDS * 2 ** (failures - 1)) if failures else 0.0


def run_epoch(
    member: Membership,
    run: Path,
    neighbours: Neighbours,
    kept: Recovery,
    report: Report,
    *,
    resume: bool,
    trackers: Sequence[Tracker],
    stop: Stop,
    watchdog: Watchdog,
) -> dict[str, Any] | Interrupted:
    """Train until the end, and return the summary, or until a worker is lost, and return why. Nothing of the epoch outlives it."""
    pipeline: WorkerPipeline | None = None
    trainer: Trainer | None = None
    started_at: int | None = None
    try:
        device = choose_device(member.config.device)
        with stop.abandoning(neighbours.interrupt):
            pipeline = WorkerPipeline(
                member.config, member.stage, neighbours, device, epoch=kept.epoch, timing=kept.timing, copies=kept.copies
            )
            kept.timing = pipeline.timing
            if kept.recovering:  # the neighbours have met this process: whoever comes after it must have a larger number
                remember(run, member.stage, neighbours.incarnation)
            trainer = Trainer(
                member.config,
                run,
                pipeline,
                resume=resume,
                recovering=kept.recovering,
                data=kept.data,
                profiles=kept.profiles,
                earlier=kept.saver,
                confirmed=kept.confirmed,
                trackers=trackers,
                stop=stop,
                report=report,
            )
        kept.data, started_at = trainer.data, trainer.position.step
        kept.profiles = trainer.memory.profiles if trainer.memory else ()
        remember(run, member.stage, neighbours.incarnation)
        again = {"again": max(0, kept.step - started_at)}
        report({"restored": started_at, "epoch": kept.epoch, **again} if kept.recovering else {"begun": started_at})
        working, engine = trainer, pipeline
        watchdog.follow(lambda: (working.doing, working.position.step, engine.runs), pipeline.timing.turn_seconds)
        return trainer.run()
    except (Interrupted, Stopping) as error:
        let_go(neighbours, pipeline, error)
        if trainer is not None:
            kept.step, kept.saver = trainer.position.step, trainer.keeper.saver
            kept.confirmed = max(kept.confirmed, trainer.keeper.confirmed)
        if isinstance(error, Stopping) or stop.now:  # a neighbour that was lost is not waited for any more
            report({"ending": error.reason})
            early = {"steps": kept_step(run, member.stage), "val_loss": None}
            return early if trainer is None else end_together(trainer, neighbours, kept.epoch + 1)
        kept.failures = 0 if started_at is not None and kept.step > started_at else kept.failures + 1
        return error.with_traceback(None)  # its frames would keep the stage of this epoch alive
    except ValueError as error:
        if trainer is None:  # this process refuses to start: the others go on with one that does not
            let_go(neighbours, pipeline, Interrupted(f"{neighbours.worker_id} refused to start: {error}", code=Abort.REFUSED))
        raise
    finally:
        watchdog.follow(None)
        close_group()


def let_go(neighbours: Neighbours, pipeline: WorkerPipeline | None, reason: LinkError) -> None:
    """End the links of an epoch, and what waits for them."""
    neighbours.drop(reason)
    if pipeline is not None:
        pipeline.release()


def kept_step(run: Path, stage: int) -> int:
    """Return the newest step of which a stage has a checkpoint in its run folder; 0: none."""
    return max((checkpoint.step_of(folder) for folder in checkpoint.steps(run) if whole_manifest(folder, stage)), default=0)


def say_last(why: str) -> None:
    """Tell people why this process ends itself."""
    print(f"thinwire: error: {why}; start it again with --resume", file=sys.stderr, flush=True)


def end_together(trainer: Trainer, neighbours: Neighbours, epoch: int) -> dict[str, Any]:
    """End at once, at the same step as the others if they can still be reached; return the summary."""
    timer = threading.Timer(AGREE_SECONDS, neighbours.interrupt)
    timer.start()
    with suppress(LinkError, TimeoutError):  # the others may be gone already: what is here is whole by itself
        agree(trainer, neighbours, epoch)
    timer.cancel()
    return trainer.end_early()


def agree(trainer: Trainer, neighbours: Neighbours, epoch: int) -> None:
    """Find out whether others have committed the step that this stage abandons, and then commit it too: all end at the same one.

    A step is committed only when every stage has its gradients of it, so whoever is behind can follow.
    """
    neighbours.stopping, neighbours.ending = False, True
    empty = Contract(epoch=epoch, limits={Kind.STEP: MESSAGE_BYTES})
    config, worker_id = trainer.config, neighbours.worker_id
    worker_ids = [*worker_id.sides(config.pipeline.stages).values(), *neighbours.joined(config).values()]
    links = neighbours.open(config, dict.fromkeys(worker_ids, empty), AGREE_SECONDS)
    mine = {"step": trainer.position.step, "outcome": asdict(trainer.outcome) if trainer.outcome else None}
    everyone = join_control(links, make_graph(config.replicas.graph, config.replicas.count), worker_id.replica).gather(mine, forms.LAST)
    if not trainer.exchange.talks_before(trainer.position.step):  # what other replicas have committed is of other gradients
        everyone = of_replica(everyone, worker_id.replica, config.pipeline.stages)
    # Not the one furthest ahead: a replica that has begun to train alone may be at a later step already.
    ahead = next((part["outcome"] for part in everyone if part["step"] == trainer.position.step + 1 and part["outcome"]), None)
    if ahead is not None:
        trainer.catch_up(decode_outcome(ahead))
