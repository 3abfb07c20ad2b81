"""Where checkpoints stand in a run folder, and which of them is the newest; `survey.py` says which parts are whole.

    checkpoints/step-000200/stage-0.safetensors, stage-0.json, ...       in the shape that the run was started in
    checkpoints/step-000400-1-5e0c2a91/stage-0.safetensors, ...          after it was resumed in another shape, once

A shape is where the model is cut and how many microbatches it is fed; another one changes the last bits. So each stretch of a run in one
shape has folders of its own, named by its past: parts in one folder always belong together, and writing in a new shape never touches
a checkpoint of the old one. Each machine of a run keeps only its own stages' parts there, and its neighbours' copies beside:

    copies/step-000200/stage-1.safetensors, stage-1.json                 read by whoever uses the model, never counted as this run's own
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.checkpoint.manifest import home_of, shape_of, whole_manifest
from thinwire.checkpoint.survey import survey
from thinwire.util.checkpoint_name import age, checkpoint_name, checkpoints_in


@dataclass(frozen=True)
class Position:
    """How far a run has come."""

    step: int
    """Steps done; the next one starts at sample `step * batch`."""
    seconds: float
    """Training time so far."""
    before: str = ""
    """Shapes that the run had before its present one, each with the step at which it ended, such as `2,2,2,2x8@200 4,4x8@400`."""


def lineage(position: Position, facts: dict[str, Any]) -> str:
    """Return what the names of folders end in during one stretch of a run: nothing at first, then how many came before, and a hash."""
    if not position.before:
        return ""
    digest = hashlib.sha256(f"{position.before} {shape_of(facts)}".encode()).hexdigest()
    return f"-{len(position.before.split())}-{digest[:8]}"


def checkpoint_folder(run: Path, position: Position, facts: dict[str, Any]) -> Path:
    """Return the folder of the checkpoint at a position."""
    return run / "checkpoints" / checkpoint_name(position.step, lineage(position, facts))


def steps(run: Path, home: str = "checkpoints") -> list[Path]:
    """List checkpoint folders, oldest first; those of `copies` where that is asked for."""
    return checkpoints_in(run / home)


def complete(run: Path) -> list[Path]:
    """List the checkpoints of which all parts are here, as this run's own or as copies of its neighbours', oldest first."""
    return survey(run, copies=True).complete()


def common(run: Path, lists: Iterable[Iterable[str]], count: int) -> Path:
    """Return the newest checkpoint that is in the list of every process, as `Survey.available` made them."""
    shared = set.intersection(*map(set, lists))
    if not shared:
        raise ValueError(
            f"{run} holds no complete checkpoint of {count} stages; copy the parts of stages that ran elsewhere here, "
            "or start a new run with another --run"
        )
    return run / "checkpoints" / max(shared, key=age)


def newest(run: Path, count: int) -> Path:
    """Return the newest checkpoint of which all parts are here; a message names the `count` stages that are wanted."""
    if (folders := steps(run)) and not complete(run):
        have = sorted(index for index in range(count) if whole_manifest(home_of(folders[-1], index), index) is not None)
        missing = ", ".join(str(index) for index in range(count) if index not in have)
        raise ValueError(
            f"{run} holds no complete checkpoint of {count} stages: {folders[-1]} lacks stages {missing}; copy their files stage-N.* from "
            "the same folder on the machines that ran them, or give the folder of a run that has all of them"
        )
    return common(run, [[folder.name for folder in complete(run)]], count)
