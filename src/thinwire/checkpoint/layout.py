"""Where checkpoints stand in a run folder, and which of them are whole.

    checkpoints/step-000200/stage-0.safetensors, stage-0.json, ...       in the shape that the run was started in
    checkpoints/step-000400-1-5e0c2a91/stage-0.safetensors, ...          after it was resumed in another shape, once

A shape is where the model is cut and how many microbatches it is fed; another one changes the last bits. So each stretch of a run in one
shape has folders of its own, named by its past: parts in one folder always belong together, and writing in a new shape never touches
a checkpoint of the old one. Each machine of a run keeps only its own stages' parts there, and its neighbours' copies beside:

    copies/step-000200/stage-1.safetensors, stage-1.json                 read by whoever uses the model, never counted as this run's own
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.checkpoint.hashes import file_sha256
from thinwire.checkpoint.manifest import copies_of, home_of, is_part_of, shape_of, tensors_path, whole_manifest
from thinwire.model.cut import StagePlan
from thinwire.util.checkpoint_name import age, checkpoint_name, checkpoints_in
from thinwire.util.files import matching

PART_NAME = re.compile(r"stage-(\d+)\.json")


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


def parts_of(folder: Path, *, copies: bool = False) -> list[dict[str, Any]] | None:
    """Return the manifests of all parts of a checkpoint if all are here and whole, in whatever shape; with `copies` a neighbour's count."""
    homes = (folder, copies_of(folder)) if copies else (folder,)
    paths = (path for home in homes for path in matching(home, "stage-*.json"))
    indices = {int(match[1]) for path in paths if (match := PART_NAME.fullmatch(path.name))}
    where = {index: home_of(folder, index) if copies else folder for index in sorted(indices)}
    found = [manifest for index, home in where.items() if (manifest := whole_manifest(home, index)) is not None]
    return found if found and len(found) == found[0]["stages"] and found[-1]["stage"] == len(found) - 1 else None


def complete(run: Path) -> list[Path]:
    """List the checkpoints of which all parts are here, as this run's own or as copies of its neighbours', oldest first."""
    return [folder for folder in steps(run) if parts_of(folder, copies=True) is not None]


def available(run: Path, plans: Sequence[StagePlan], *, verify: bool = False, copies: bool = False) -> list[str]:
    """Name the checkpoints that some stages can be loaded from here: their own parts, or all parts of another shape.

    With `copies` those that are kept for neighbours count too: to use a model, not to vote on how to go on. With `verify` the tensors'
    bytes are hashed too, so that a damaged one is passed over.
    """
    names = []
    for folder in steps(run):
        own = [whole_manifest(home_of(folder, plan.index) if copies else folder, plan.index) for plan in plans]
        fitting = [part for part, plan in zip(own, plans, strict=True) if part is not None and is_part_of(part, plan)]
        needed = fitting if len(fitting) == len(plans) else parts_of(folder, copies=copies)
        if needed is not None and (not verify or all(is_undamaged(folder, manifest) for manifest in needed)):
            names.append(folder.name)
    return names


def proven(run: Path) -> int:
    """Return the newest step of which the parts here say that every worker had a checkpoint; -1: none was ever whole everywhere."""
    found = [(folder, PART_NAME.fullmatch(path.name)) for folder in steps(run) for path in matching(folder, "stage-*.json")]
    parts = [whole_manifest(folder, int(match[1])) for folder, match in found if match is not None]
    # An earlier release did not say: then there was one, and to begin again would be wrong.
    return max((part.get("everyone", part["step"]) for part in parts if part is not None), default=-1)


def is_undamaged(folder: Path, manifest: dict[str, Any]) -> bool:
    """Tell whether a part's tensors are those that its manifest vouches for."""
    return file_sha256(tensors_path(folder, manifest["stage"])) == manifest["sha256"]


def common(run: Path, lists: Iterable[Iterable[str]], count: int) -> Path:
    """Return the newest checkpoint that is in the list of every process, as `available` made them."""
    shared = set.intersection(*map(set, lists))
    if not shared:
        raise ValueError(
            f"{run} holds no complete checkpoint of {count} stages; copy the parts of stages that ran elsewhere here, "
            "or start a new run with another --run"
        )
    return max((run / "checkpoints" / name for name in shared), key=age)


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
