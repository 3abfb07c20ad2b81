"""A run's checkpoint, opened to be read tensor by tensor: found, checked by sha256, never loaded whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from thinwire import checkpoint
from thinwire.checkpoint.fitting import shape_and_format
from thinwire.checkpoint.manifest import EXCHANGE, OPTIMIZER, tensors_path
from thinwire.checkpoint.reading import HAVE_BASE
from thinwire.checkpoint.safetensors import Stored, list_tensors
from thinwire.codecs.base import DTYPES
from thinwire.config.sections import RunConfig
from thinwire.config.toml import CONFIG_FILE
from thinwire.model.stage import Stage
from thinwire.optim.optimizers import EMA
from thinwire.run.saved import newest_whole, read_settings


@dataclass(frozen=True)
class Checkpointed:
    """The parts of one checkpoint: per stage, of the shape it was written in, its manifest and its weights, without any state."""

    run: Path
    config: RunConfig
    folder: Path
    manifests: list[dict[str, Any]]
    parts: list[dict[str, Stored]]
    base: dict[str, Stored] = field(default_factory=dict)
    """The frozen weights of an adapter run."""

    @property
    def step(self) -> int:
        return checkpoint.step_of(self.folder)

    @property
    def dtype(self) -> torch.dtype:
        """Return the number format of the run's weights: with bf16 compute they are fp32."""
        return torch.float32 if self.config.train.dtype == "bf16" else DTYPES[self.config.train.dtype]

    @property
    def tensors(self) -> dict[str, Stored]:
        """Return the tensors of all stages; what every stage holds a copy of is the first one's."""
        return {name: tensor for part in reversed(self.parts) for name, tensor in part.items()} | self.base

    @torch.no_grad()
    def fill(self, stage: Stage) -> None:
        """Copy a stage's weights into it."""
        tensors = self.tensors
        for name, target in stage.state_dict().items():
            here, there = shape_and_format(target), shape_and_format(tensors.get(name))
            if here != there:
                raise ValueError(
                    f"{self.folder} does not fit the settings in {self.run / CONFIG_FILE}: {name} is {there} there, {here} here"
                )
            target.copy_(tensors[name].whole())


def open_checkpoint(run: Path, step: int | None = None, *, ema: bool = False) -> Checkpointed:
    """Open a run's newest complete checkpoint, or that of a step, once the sha256 of every part has been checked.

    With `ema` the running mean stands for each weight that has one.
    """
    config = read_settings(run)
    there = {checkpoint.step_of(folder): folder for folder in checkpoint.complete(run)}
    if step is not None and step not in there:
        raise ValueError(
            f"{run} has no complete checkpoint of step {step}; it has {', '.join(map(str, there)) or 'none'}: choose one of them"
        )
    folder = newest_whole(run, config.pipeline.stages) if step is None else there[step]
    manifests = checkpoint.parts_of(folder, copies=True)
    assert manifests is not None, "a complete checkpoint has all its parts"
    checkpoint.refuse_mixed(folder, manifests)
    found = opened_parts(folder, manifests, "choose an older checkpoint with --step")
    if ema and not any(name.endswith(f"/{EMA}") for part in found for name in part):
        raise ValueError(f"--ema: {folder} holds no running mean of the weights; leave --ema out, or train with --train.ema 0.999")
    parts = [
        {
            name: part.get(f"{OPTIMIZER}{name}/{EMA}", tensor) if ema else tensor
            for name, tensor in part.items()
            if not name.startswith((OPTIMIZER, EXCHANGE))
        }
        for part in found
    ]
    return Checkpointed(run, config, folder, manifests, parts, opened_base(folder, config) if config.adapter.rank else {})


def opened_parts(folder: Path, manifests: list[dict[str, Any]], advice: str) -> list[dict[str, Stored]]:
    """List the tensors of some parts, whose sha256 is checked."""
    parts = []
    for index, manifest in enumerate(manifests):
        path = tensors_path(checkpoint.home_of(folder, index), index)
        if checkpoint.file_sha256(path) != manifest["sha256"]:
            raise ValueError(f"{path} does not match the sha256 in its manifest: it is damaged; {advice}")
        parts.append(list_tensors(path, advice))
    return parts


def opened_base(folder: Path, config: RunConfig) -> dict[str, Stored]:
    """List the frozen weights that the adapter in a checkpoint belongs to."""
    home = checkpoint.base_folder(folder)
    manifests = checkpoint.parts_of(home, copies=True)
    if manifests is None or any(manifest.get("base") != config.adapter.base for manifest in manifests):
        raise ValueError(f"{home} does not hold all frozen weights that the adapter belongs to; {HAVE_BASE}")
    parts = opened_parts(home, manifests, HAVE_BASE)
    return {name: tensor for part in parts for name, tensor in part.items()}
