"""Checkpoints: per stage one safetensors file and one JSON manifest with its sha256, written atomically.

Layout: checkpoints/step-000200/stage-0.safetensors and stage-0.json. A manifest is written after its tensors, so a stage's part is
complete exactly when its manifest is there. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from thinwire.files import write_atomic
from thinwire.model.stages import Stage
from thinwire.optimizer import StageOptimizer

FORMAT = 1
STEP_NAME = re.compile(r"step-\d{6,}")
KEEP = 2
"""Complete checkpoints that stay; older ones are deleted."""


@dataclass(frozen=True)
class Position:
    """How far a run has come."""

    step: int
    """Steps done; the next one starts at sample `step * batch`."""
    seconds: float
    """Training time so far."""


def file_sha256(path: Path) -> str:
    """Hash a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save(run: Path, stages: list[Stage], optimizers: list[StageOptimizer], position: Position, facts: dict[str, str]) -> Path:
    """Write all stages' parts of one checkpoint, then delete checkpoints that are no longer needed."""
    folder = run / "checkpoints" / f"step-{position.step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    for stage, optimizer in zip(stages, optimizers, strict=True):
        save_stage(folder, stage, optimizer, position, facts)
        prune(run, stage.plan.index)
    return folder


def prune(run: Path, index: int) -> None:
    """Delete a stage's parts of all but its newest complete checkpoints; the manifest goes first, so none is left half."""
    mine = [folder for folder in steps(run) if (folder / f"stage-{index}.json").exists()]
    for folder in mine[:-KEEP]:
        (folder / f"stage-{index}.json").unlink()
        (folder / f"stage-{index}.safetensors").unlink(missing_ok=True)
        with suppress(OSError):  # another stage's part is still there
            folder.rmdir()


def save_stage(folder: Path, stage: Stage, optimizer: StageOptimizer, position: Position, facts: dict[str, str]) -> None:
    """Write one stage's part: tensors first, manifest last."""
    path = folder / f"stage-{stage.plan.index}.safetensors"
    partial = path.with_name(path.name + ".partial")
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in _tensors(stage, optimizer).items()}, partial)
    with partial.open("rb+") as file:
        os.fsync(file.fileno())
    manifest = {"format": FORMAT, "stage": stage.plan.index, "stages": stage.plan.count, "layers": list(stage.plan.layers), **facts}
    manifest |= asdict(position) | {"sha256": file_sha256(partial), "basis_version": stage.stream.version}
    path.with_suffix(".json").unlink(missing_ok=True)  # of the same step, before a resume: it must not vouch for these tensors
    partial.replace(path)
    write_atomic(path.with_suffix(".json"), json.dumps(manifest, indent=1).encode())


def _tensors(stage: Stage, optimizer: StageOptimizer | None) -> dict[str, Tensor]:
    state = {} if optimizer is None else optimizer.state_tensors()
    return {**stage.state_dict(), **{f"optimizer/{name}": tensor for name, tensor in state.items()}}


def steps(run: Path) -> list[Path]:
    """List checkpoint folders, oldest first."""
    folders = (run / "checkpoints").glob("step-*")
    return sorted((folder for folder in folders if STEP_NAME.fullmatch(folder.name)), key=step_of)


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint folder."""
    return int(folder.name.removeprefix("step-"))


def is_complete(folder: Path, indices: Iterable[int]) -> bool:
    """Tell whether the parts of the given stages were written to the end."""
    return all((folder / f"stage-{index}{ending}").exists() for index in indices for ending in (".json", ".safetensors"))


def complete_steps(run: Path, indices: Iterable[int]) -> list[int]:
    """List the steps at which the parts of the given stages are here."""
    indices = list(indices)
    return [step_of(folder) for folder in steps(run) if is_complete(folder, indices)]


def common(run: Path, lists: list[list[int]], count: int) -> Path:
    """Return the newest checkpoint that is in the list of every process: each machine of a run keeps only its own stages' parts."""
    shared = set.intersection(*map(set, lists))
    if not shared:
        raise ValueError(
            f"{run} holds no complete checkpoint of {count} stages; copy the parts of stages that ran elsewhere here, "
            "or start a new run with another --run"
        )
    return run / "checkpoints" / f"step-{max(shared):06d}"


def newest(run: Path, count: int) -> Path:
    """Return the newest complete checkpoint of a run with `count` stages, all of them here."""
    return common(run, [complete_steps(run, range(count))], count)


def load(folder: Path, stages: list[Stage], optimizers: list[StageOptimizer] | None, facts: dict[str, str]) -> Position:
    """Restore all stages, and their optimizers where given, from one checkpoint."""
    manifests = [read_manifest(folder, stage.plan.index, facts) for stage in stages]
    parts = [read_stage(folder, stage, manifest) for stage, manifest in zip(stages, manifests, strict=True)]
    for index, (weights, state) in enumerate(parts):
        stages[index].load_state_dict(weights)
        if optimizers is not None:
            if manifests[index]["step"] and not state:
                raise ValueError(
                    f"{folder} holds weights without optimizer state, as `thinwire export` writes them; it can be evaluated, not resumed"
                )
            optimizers[index].load_state_tensors(state)
    return Position(manifests[0]["step"], manifests[0]["seconds"])


def read_manifest(folder: Path, index: int, facts: dict[str, str]) -> dict:
    """Read a stage's manifest and refuse one that is of another format or run."""
    path = folder / f"stage-{index}.json"
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); delete {folder} and resume from the checkpoint before it") from None
    expected = {"format": FORMAT, "stage": index, **facts}
    for name, value in expected.items():
        if manifest.get(name) != value:
            raise ValueError(
                f"{path} has {name} {manifest.get(name)!r}, this run has {value!r}; resume with the settings and data of that run"
            )
    return manifest


def read_stage(folder: Path, stage: Stage, manifest: dict) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a stage's weights and optimizer state once sha256, names and shapes have been checked."""
    path = folder / f"stage-{stage.plan.index}.safetensors"
    if file_sha256(path) != manifest["sha256"]:
        raise ValueError(
            f"{path} does not match the sha256 in its manifest: it is damaged; delete {folder} and resume from the one before it"
        )
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file ({error}); delete {folder} and resume from the checkpoint before it") from None
    state = {name.removeprefix("optimizer/"): tensor for name, tensor in tensors.items() if name.startswith("optimizer/")}
    weights = {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer/")}
    expected = {name: tuple(tensor.shape) for name, tensor in stage.state_dict().items()}
    if (found := {name: tuple(tensor.shape) for name, tensor in weights.items()}) != expected:
        differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise ValueError(
            f"{path} does not fit this model: {differing[0]} is {found.get(differing[0])} there, {expected.get(differing[0])} here"
        )
    return weights, state


def tensor_hashes(modules: Iterable[nn.Module]) -> dict[str, str]:
    """Hash every tensor of some stages, by global name."""
    hashes = {}
    for module in modules:
        for name, tensor in module.state_dict().items():
            digest = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            hashes[name] = digest.hexdigest()
    return hashes


def combined_sha256(hashes: Mapping[str, str]) -> str:
    """Hash names and hashes of tensors in the order of their names: it does not depend on the cut."""
    return hashlib.sha256("".join(f"{name} {hashes[name]}\n" for name in sorted(hashes)).encode()).hexdigest()


def weights_sha256(modules: Iterable[nn.Module]) -> str:
    """Hash the weights of stages."""
    return combined_sha256(tensor_hashes(modules))
