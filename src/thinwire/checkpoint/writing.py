"""Write a stage's part of a checkpoint so that a power cut at any byte leaves it whole or absent.

Tensors go into a file of another name, to the disk, and then into place; the manifest follows in the same way. So a part is whole
exactly when its manifest is there.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.checkpoint.hashes import file_sha256
from thinwire.checkpoint.layout import Position, checkpoint_folder, lineage, steps
from thinwire.checkpoint.manifest import EXCHANGE, FORMAT, OPTIMIZER, encode_manifest, manifest_path, tensors_path, whole_manifest
from thinwire.checkpoint.safetensors import Piece, write_file
from thinwire.checkpoint.survey import parts_of, survey_of
from thinwire.model.stage import Stage
from thinwire.optim.optimizers import StageOptimizer
from thinwire.util.checkpoint_name import age, newer_in, step_of
from thinwire.util.files import matching, remove_matching, sync, write_atomic
from thinwire.util.system import replace_file

KEEP = 2
"""Checkpoints that stay: the newest, and one before it should a disk damage that one."""
TRIES = 5
"""How often a folder may vanish, because another stage did not get its part in, before a write is given up."""


@dataclass(frozen=True)
class Part:
    """One stage's part of a checkpoint in memory: what its manifest says, without the hash, and its tensors."""

    manifest: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def index(self) -> int:
        return self.manifest["stage"]

    @property
    def size(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def part_of(
    stage: Stage,
    optimizer: StageOptimizer,
    position: Position,
    facts: dict[str, Any],
    *,
    copy: bool,
    exchange: Mapping[str, Tensor] | None = None,
    everyone: int | None = None,
) -> Part:
    """Take a stage's part as it is now; with `copy` in memory of its own, that later steps do not change.

    `everyone` is a step of which all workers are known to have a checkpoint.
    """
    plan = stage.plan
    manifest = {"format": FORMAT, "stage": plan.index, "stages": plan.count, "layers": list(plan.layers), **facts}
    state = optimizer.state_tensors()
    updated = {name.rpartition("/")[0] for name in state}
    # What no step has updated has no state: a reader must know, or could not tell it from state that was lost.
    stateless = [name for name in optimizer.named if name not in updated] if state else []
    manifest |= {**asdict(position), "basis_version": stage.stream.version, "stateless": stateless}
    manifest |= {} if everyone is None else {"everyone": everyone}
    tensors = {name: tensor for name, tensor in stage.state_dict().items() if name not in stage.frozen}
    tensors |= {f"{OPTIMIZER}{name}": tensor for name, tensor in state.items()}
    tensors |= {f"{EXCHANGE}{name}": tensor for name, tensor in (exchange or {}).items()}
    return Part(
        manifest,
        {
            name: tensor.detach().to("cpu", copy=copy, memory_format=torch.contiguous_format).contiguous()
            for name, tensor in tensors.items()
        },
    )


def save(run: Path, stages: Sequence[Stage], optimizers: Sequence[StageOptimizer], position: Position, facts: dict[str, Any]) -> Path:
    """Write some stages' parts of one checkpoint at once, then delete those that are no longer needed."""
    folder = checkpoint_folder(run, position, facts)
    parts = [part_of(*pair, position, facts, copy=False) for pair in zip(stages, optimizers, strict=True)]
    write_parts(folder, parts)
    prune(run, [part.index for part in parts], folder)
    return folder


def save_stage(folder: Path, stage: Stage, optimizer: StageOptimizer, position: Position, facts: dict[str, Any]) -> None:
    """Write one stage's part into a folder."""
    write_parts(folder, [part_of(stage, optimizer, position, facts, copy=False)])


def save_base(folder: Path, stage: Stage, facts: dict[str, Any]) -> None:
    """Write the frozen weights of one stage; checkpoints hold the rest, and name these by the hash in `facts`."""
    plan = stage.plan
    manifest = {"format": FORMAT, "stage": plan.index, "stages": plan.count, "layers": list(plan.layers), **facts}
    manifest |= {**asdict(Position(0, 0.0)), "basis_version": 0}
    write_parts(folder, [Part(manifest, {name: stage.state_dict()[name].contiguous() for name in sorted(stage.frozen)})])


def write_parts(folder: Path, parts: Iterable[Part]) -> None:
    """Write all these parts of one checkpoint to the disk, or leave nothing new."""
    made: list[int] = []
    try:
        for part in parts:
            if write_in(folder, part):
                made.append(part.index)
    except BaseException:
        with suppress(OSError):
            remove_parts(folder, made)
            folder.rmdir()
        raise


def write_in(folder: Path, part: Part) -> bool:
    """Write one part in a folder that others make and delete too: a stage that fails takes the empty folder away."""
    for left in reversed(range(TRIES)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for parent in (folder.parent, folder.parent.parent):
                sync(parent)
            return write_part(folder, part)
        except (FileNotFoundError, FileExistsError):  # gone again, or gone while `mkdir` looked whether it is a folder
            if not left:
                raise
    raise AssertionError


def write_part(folder: Path, part: Part) -> bool:
    """Write one part, tensors first and manifest last; return False if the very same was there."""
    path, seal = tensors_path(folder, part.index), manifest_path(folder, part.index)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex}.tmp")
    try:
        digest = write_file(temporary, [piece(name, tensor) for name, tensor in part.tensors.items()])
        there = whole_manifest(folder, part.index)
        # After a resume a step is done again, with the same bits: to put it in place once more could only lose it.
        if there is not None and there["sha256"] == digest == file_sha256(path):
            return False
        seal.unlink(missing_ok=True)  # it must not vouch for these tensors
        size = temporary.stat().st_size
        replace_file(temporary, path)
        sync(folder)
        write_atomic(seal, encode_manifest({**part.manifest, "sha256": digest, "bytes": size}))
        sync(folder)
        return True
    except BaseException:
        with suppress(OSError):
            if whole_manifest(folder, part.index) is None:
                remove_parts(folder, [part.index])
        raise
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def piece(name: str, tensor: Tensor) -> Piece:
    """Return a tensor as something to write a few rows at a time: no second copy of it is made."""
    return Piece(name, tuple(tensor.shape), tensor.dtype, lambda start, stop: tensor[start:stop] if tensor.dim() else tensor.reshape(1))


def names_of(index: int | None) -> tuple[str, str]:
    """Return patterns for the files of one stage, or of all: manifests go first, so that no part is left half."""
    label = "*" if index is None else str(index)
    return f"stage-{label}.json", f"*stage-{label}.*"


def remove_parts(folder: Path, indices: Sequence[int | None]) -> None:
    """Delete what a folder holds of some stages, and the folder with the last of them."""
    for index in indices:
        remove_matching(folder, names_of(index))


def prune(run: Path, indices: Sequence[int], newest: Path, spare: Collection[int] = ()) -> None:
    """Delete these stages' parts of checkpoints that are older than one that all workers have.

    Those of the steps in `spare` stay, and of others as many as it takes to have `KEEP`. Folders of another shape have no owner any more:
    all their parts go.
    """

    def is_ours(folder: Path) -> bool:
        return age(folder)[1:] == age(newest)[1:]

    def is_whole(folder: Path) -> bool:
        return all(whole_manifest(folder, index) for index in indices) if is_ours(folder) else parts_of(folder) is not None

    candidates = [folder for folder in steps(run) if step_of(folder) <= step_of(newest)]
    good = [folder for folder in candidates if is_whole(folder)]
    if not good:
        return
    kept = [folder for folder in good if folder == good[-1] or step_of(folder) in spare]
    others = [folder for folder in good if folder not in kept]
    kept += others[len(others) - max(0, KEEP - len(kept)) :]
    for folder in candidates:
        if folder not in kept and (folder in good or age(folder) < min(map(age, kept))):
            remove_parts(folder, indices if is_ours(folder) else [None])


def remove_newer(run: Path, indices: Sequence[int], position: Position, facts: dict[str, Any], restored: Path | None) -> None:
    """Delete these stages' parts, and all copies, of steps behind the one that all go on from: these are done again, maybe otherwise.

    Parts of one step from both trainings would look as if they belonged together. Only the present stretch of the run is concerned;
    another one has its turn when it is gone on with. `restored` is where that step was read, None for the beginning.
    """
    stretch = lineage(position, facts)
    own, copies = newer_in(run / "checkpoints", position.step, stretch), newer_in(run / "copies", position.step, stretch)
    gone = [*((folder, names_of(index)) for folder in own for index in indices), *((folder, names_of(None)) for folder in copies)]
    unsaid = restored if own else None
    if unsaid is not None:
        with suppress(OSError):  # a full disk has room once they are gone
            vouch(unsaid)
            unsaid = None
    for folder, (manifest, rest) in gone:
        try:
            remove_matching(folder, (manifest, rest))
        except OSError:
            if matching(folder, manifest):  # without a manifest the rest is no part
                raise
    if unsaid is not None:
        vouch(unsaid)


def vouch(folder: Path) -> None:
    """Write into a checkpoint that every worker has it: newer parts, which said so, are about to go."""
    silent = {index: part for index, part in survey_of(folder).items() if part.get("everyone", part["step"]) < part["step"]}
    texts = {manifest_path(folder, index): encode_manifest({**part, "everyone": part["step"]}) for index, part in silent.items()}
    for path, text in texts.items():
        write_atomic(path, text)
