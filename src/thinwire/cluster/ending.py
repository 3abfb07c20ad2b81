"""End a run at once, at the same step everywhere: whoever is a step behind the others commits it too."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from thinwire import checkpoint
from thinwire.checkpoint.manifest import whole_manifest
from thinwire.cluster.neighbours import Neighbours
from thinwire.link.contract import Contract
from thinwire.link.errors import LinkError
from thinwire.link.frame import Kind
from thinwire.pipeline import forms
from thinwire.pipeline.backend import MESSAGE_BYTES
from thinwire.pipeline.control import decode_outcome
from thinwire.pipeline.links import join_group
from thinwire.pipeline.outcome import of_replica
from thinwire.run.last import end_early
from thinwire.run.trainer import Trainer

AGREE_SECONDS = 3.0
"""How long a stage that ends waits for its neighbours to agree on the last step."""


def kept_step(run: Path, stage: int) -> int:
    """Return the newest step of which a stage has a checkpoint in its run folder; 0: none."""
    return max((checkpoint.step_of(folder) for folder in checkpoint.steps(run) if whole_manifest(folder, stage)), default=0)


def end_together(trainer: Trainer, neighbours: Neighbours, epoch: int) -> dict[str, Any]:
    """End at once, at the same step as the others if they can still be reached; return the summary."""
    runtime = neighbours.endpoint.runtime
    agreed = runtime.event()

    def interrupt() -> None:
        if not agreed.wait(AGREE_SECONDS):
            neighbours.interrupt()

    runtime.thread("thinwire-ending", interrupt).start()
    with suppress(LinkError, TimeoutError):  # the others may be gone already: what is here is whole by itself
        agree_on_last(trainer, neighbours, epoch)
    agreed.set()
    return end_early(trainer)


def agree_on_last(trainer: Trainer, neighbours: Neighbours, epoch: int) -> None:
    """Find out whether others have committed the step that this stage abandons, and then commit it too: all end at the same one.

    A step is committed only when every stage has its gradients of it, so whoever is behind can follow.
    """
    neighbours.end_run()
    empty = Contract(limits={Kind.STEP: MESSAGE_BYTES})
    config, worker_id = trainer.config, neighbours.worker_id
    links = neighbours.open(dict.fromkeys((*neighbours.sides.values(), *neighbours.in_replicas.values()), empty), epoch, AGREE_SECONDS)
    mine = {"step": trainer.position.step, "outcome": asdict(trainer.outcome) if trainer.outcome else None}
    everyone = join_group(config, worker_id, links, neighbours.interrupt).gather(mine, forms.LAST)
    if not trainer.exchange.talks_before(trainer.position.step):  # what other replicas have committed is of other gradients
        everyone = of_replica(everyone, worker_id.replica, config.pipeline.stages)
    # Not the one furthest ahead: a replica that has begun to train alone may be at a later step already.
    ahead = next((part["outcome"] for part in everyone if part["step"] == trainer.position.step + 1 and part["outcome"]), None)
    if ahead is not None:
        trainer.catch_up(decode_outcome(ahead))
