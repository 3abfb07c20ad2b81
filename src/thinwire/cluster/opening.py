"""Open one epoch of a worker: its stage, the links to its neighbours, the group of all workers, copies of checkpoints if they are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from thinwire.cluster.backups import Copies
from thinwire.cluster.neighbours import Neighbours
from thinwire.config.sections import RunConfig
from thinwire.model.stage import Stage
from thinwire.pipeline.control import Control
from thinwire.pipeline.links import exchange_contract, join_group
from thinwire.pipeline.worker import Known, WorkerPipeline
from thinwire.util.device import choose_device

SPARE_BYTES = 2**16
Make = Callable[[RunConfig, int, torch.device, Known | None], WorkerPipeline]
"""Make what computes a stage on a device, with what the epoch before found out."""


@dataclass(frozen=True)
class Opened:
    """What a worker works with until its links end."""

    compute: WorkerPipeline
    group: Control
    backups: Copies | None

    def close(self) -> None:
        """End what waits for the links, which have ended."""
        if self.backups is not None:
            self.backups.close()


def open_stage(
    config: RunConfig,
    neighbours: Neighbours,
    *,
    epoch: int = 0,
    known: Known | None = None,
    copies: Path | None = None,
    make: Make = WorkerPipeline,
) -> Opened:
    """Make the stage, meet the neighbours of an epoch and agree with them on basis, shared parameters and schedule.

    `known` is what was found out in the epoch before; `copies` the run folder, where neighbours keep each other's checkpoints; `make`
    what computes the stage.
    """
    worker = neighbours.worker_id
    compute = make(config, worker.stage, choose_device(config.device, neighbours.number_here), known)
    contracts = {beside: compute.boundaries[side].contract for side, beside in neighbours.sides.items()}
    if neighbours.in_replicas:
        contracts |= dict.fromkeys(neighbours.in_replicas.values(), exchange_contract())
    links = neighbours.open(contracts, epoch)
    (stage,) = compute.stages
    parameters = sum(parameter.numel() for parameter in stage.parameters())
    group = join_group(config, worker, links, neighbours.interrupt, parameters)
    compute.open(links, group, neighbours.report)
    backups = None
    if copies is not None:
        backups = Copies(
            copies, worker.stage, config.pipeline.stages, links, largest_part(stage, parameters), group, neighbours.endpoint.runtime
        )
        backups.open()
    return Opened(compute, group, backups)


def largest_part(stage: Stage, parameters: int) -> int:
    """Return more bytes than any stage's part of a checkpoint has: all layers, and ends like this one's, with their state."""
    return 64 * (stage.architecture.count(stage.model, stage.model.layers) + parameters) + SPARE_BYTES
