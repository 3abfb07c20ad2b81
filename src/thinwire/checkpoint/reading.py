"""Restore stages from a checkpoint of the same shape, bit for bit, or of another one.

Names are global, so a stage of another shape collects its tensors from all parts. What a codec has learnt at a cut belongs to that cut:
a shape that drops it, or adds one where there is nothing learnt, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from thinwire.checkpoint.fitting import refuse_misfit, refuse_state
from thinwire.checkpoint.layout import Position
from thinwire.checkpoint.manifest import (
    EXCHANGE,
    OPTIMIZER,
    base_folder,
    copies_of,
    home_of,
    is_part_of,
    manifest_path,
    read_manifest,
    shape_of,
    tensors_path,
)
from thinwire.checkpoint.survey import is_undamaged
from thinwire.model.names import boundary_of, is_statistic
from thinwire.model.stage import Stage
from thinwire.optim.optimizers import StageOptimizer
from thinwire.util.files import matching
from thinwire.util.shown import shown

Tensors = dict[str, Tensor]
HAVE_BASE = "copy checkpoints/base from a machine that has it, or import the same model again and copy it from there"
"""What helps when the base of an adapter is missing or damaged."""


def load_stages(
    folder: Path,
    stages: Sequence[Stage],
    optimizers: Sequence[StageOptimizer] | None,
    facts: dict[str, Any],
    exchange: Callable[[Tensors], None] | None = None,
) -> Position:
    """Restore stages, and their optimizers where given, from one checkpoint; nothing is changed before all of it has been checked.

    `exchange` is given what the stages kept of their exchange with other replicas.
    """
    manifests, same = needed_manifests(folder, stages, facts)
    position = position_of(manifests, facts)
    parts = [read_part(home_of(folder, manifest["stage"]), manifest) for manifest in manifests]
    exchanged = taken_out(parts, EXCHANGE)
    if exchanged and not same:
        raise ValueError(
            f"{folder} holds the state of an exchange between replicas, which belongs to its shape; resume in the shape that it has"
        )
    if not same:
        parts = in_other_shape(folder, stages, merge(folder, parts))
    states = [taken_out([part], OPTIMIZER) for part in parts]
    for stage, weights in zip(stages, parts, strict=True):
        weights |= base_tensors(folder, stage, manifests[0].get("base"))
        refuse_misfit(folder, stage, weights)
    if optimizers is not None and manifests[0]["step"]:  # before the first step there is no state
        told = all("stateless" in manifest for manifest in manifests)
        stateless = [name for manifest in manifests for name in manifest["stateless"]] if told else None
        for stage, optimizer, state in zip(stages, optimizers, states, strict=True):
            refuse_state(folder, stage, optimizer, state, stateless)
    if exchange is not None and manifests[0]["step"]:
        exchange(exchanged)
    for index, (weights, state) in enumerate(zip(parts, states, strict=True)):
        # Both copy into memory of torch's own: the bits of later steps must not depend on how a file happened to be aligned.
        stages[index].load_state_dict(weights)
        if optimizers is not None:
            optimizers[index].load_state_tensors(state)
    return position


def in_other_shape(folder: Path, stages: Sequence[Stage], merged: Tensors) -> list[Tensors]:
    """Deal the tensors of all parts out to stages of another shape."""
    for stage in stages:
        refuse_other_cuts(folder, stage, merged)
    return [of_stage(stage, merged) for stage in stages]


def base_tensors(folder: Path, stage: Stage, digest: str | None) -> Tensors:
    """Return the frozen weights of a stage, which stand once beside all checkpoints of a run, in whatever shape it was imported in."""
    if not stage.frozen:
        return {}
    home = base_folder(folder)
    try:
        manifests, same = needed_manifests(home, [stage], {"base": digest})
        parts = [read_part(home_of(home, manifest["stage"]), manifest) for manifest in manifests]
        merged = parts[0] if same else merge(home, parts)
    except ValueError as error:
        reason = str(error).partition(";")[0]  # what would mend a checkpoint does not mend these
        raise ValueError(f"the frozen weights that the adapter in {folder} belongs to cannot be read: {reason}; {HAVE_BASE}") from None
    return {name: merged[name] for name in stage.frozen if name in merged}


def needed_manifests(folder: Path, stages: Sequence[Stage], facts: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """Read the manifests of the stages' own parts, or of all parts of another shape; say whether they are the stages' own."""
    homes = [home_of(folder, stage.plan.index) for stage in stages]
    own = [
        read_manifest(home, stage.plan.index, facts)
        for home, stage in zip(homes, stages, strict=True)
        if manifest_path(home, stage.plan.index).exists()
    ]
    same = len(own) == len(stages) and all(is_part_of(part, stage.plan) for part, stage in zip(own, stages, strict=True))
    manifests = own if same else all_manifests(folder, facts)
    refuse_mixed(folder, manifests)
    return manifests, same


def all_manifests(folder: Path, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Read the manifests of all parts of a checkpoint of another shape."""
    paths = [path for home in (folder, copies_of(folder)) for path in matching(home, "stage-*.json") if path.stem[6:].isdigit()]
    there = sorted({int(path.stem.removeprefix("stage-")) for path in paths})
    if not there:
        raise ValueError(f"{folder} holds no part of a checkpoint; check --run, or copy the parts there")
    count = read_manifest(home_of(folder, there[0]), there[0], facts)["stages"]
    missing = sorted(set(range(count)) - set(there))
    if missing:
        raise ValueError(
            f"{folder} is of another shape, {count} stages, and lacks the parts of stages {shown(', '.join(map(str, missing)), 80)}; "
            "another shape needs all of them: copy them here, or resume in the shape that it has"
        )
    return [read_manifest(home_of(folder, index), index, facts) for index in range(count)]


def refuse_mixed(folder: Path, manifests: list[dict[str, Any]]) -> None:
    """Refuse parts that do not belong together."""
    for name in ("step", "stages", "basis_version", "before", "settings", "config", "data"):
        if len({repr(manifest.get(name)) for manifest in manifests}) > 1:
            raise ValueError(f"the parts of {folder} differ in {name}; copy the parts of one run together")


def read_part(folder: Path, manifest: dict[str, Any]) -> Tensors:
    """Return a part's tensors, mapped from its file, once the sha256 has been checked."""
    path = tensors_path(folder, manifest["stage"])
    if not path.is_file() or not is_undamaged(folder, manifest):
        raise ValueError(
            f"{path} does not match the sha256 in its manifest: it is damaged; delete {folder} and resume from the one before it"
        )
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file ({error}); delete {folder} and resume from the checkpoint before it") from None


def taken_out(parts: list[Tensors], prefix: str) -> Tensors:
    """Take the tensors whose names begin like this out of all parts; return them without the prefix."""
    return {name.removeprefix(prefix): part.pop(name) for part in parts for name in list(part) if name.startswith(prefix)}


def merge(folder: Path, parts: list[Tensors]) -> Tensors:
    """Put the tensors of all parts together; what several parts hold, such as the basis, must be the same."""
    merged: Tensors = {}
    for part in parts:
        for name, tensor in part.items():
            if name in merged and not torch.equal(merged[name], tensor):
                raise ValueError(f"the parts of {folder} differ in {name}, which all stages share; copy the parts of one run together")
            merged[name] = tensor
    return merged


def of_stage(stage: Stage, tensors: Tensors) -> Tensors:
    """Choose a stage's weights and the optimizer state of its parameters among those of all stages; at new cuts statistics begin anew."""
    wanted, trained = stage.state_dict(), stage.trained().keys()
    fresh = {name: tensor.clone() for name, tensor in wanted.items() if is_statistic(name) and name not in tensors}
    return fresh | {
        name: tensor
        for name, tensor in tensors.items()
        if name in wanted or (name.startswith(OPTIMIZER) and name.removeprefix(OPTIMIZER).rpartition("/")[0] in trained)
    }


def refuse_other_cuts(folder: Path, stage: Stage, tensors: Tensors) -> None:
    """Refuse a stage without a cut at which something was learnt, or with one at which nothing was."""
    layers, state = stage.plan.layers, stage.state_dict()
    learnt = {layer for name in tensors if (layer := boundary_of(name)) is not None}
    dropped = sorted(layer for layer in learnt if layers.start < layer < layers.stop)
    added = sorted({layer for name in state if name not in tensors and (layer := boundary_of(name)) is not None} - learnt)
    if learnt and layers.stop not in learnt and any(state[name].shape != tensors[name].shape for name in state.keys() & tensors.keys()):
        added.append(layers.stop)  # a block in front of a cut that is narrower there: bottleneck
    if dropped or added:
        wanted = ", ".join(map(str, sorted(learnt))) or "none"
        change = (
            f"joins the layers before and behind {dropped[0]}" if dropped else f"cuts before layer {added[0]}, where nothing was learnt"
        )
        raise ValueError(
            f"{folder} holds what this codec has learnt at its cuts, before layers {wanted}; stage {stage.plan.index} of the new shape "
            f"{change}: keep every one of these cuts and add none (pipeline.stages, pipeline.split), or resume in the shape that it has"
        )


def position_of(manifests: list[dict[str, Any]], facts: dict[str, Any]) -> Position:
    """Return how far a checkpoint had come; a change of shape begins a new stretch of the run."""
    first = manifests[0]
    before = first.get("before", "")
    if "split" in facts:
        old = {name: first.get(name) for name in ("split", "microbatches")}
        if "split" not in first:  # format 1 did not know the whole shape; in that of config.toml nothing has changed
            complete = len(manifests) == first["stages"]
            split = ",".join(str(len(manifest["layers"])) for manifest in manifests) if complete else facts["split"]
            old = {"split": split, "microbatches": facts["microbatches"]}
        if shape_of(old) != shape_of(facts):
            before = f"{before} {shape_of(old)}@{first['step']}".strip()
    return Position(first["step"], first["seconds"], before)
