"""Adapters as peft writes and reads them: `adapter_config.json` and `adapter_model.safetensors`; and base plus adapter as one network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.checkpoint.safetensors import Piece, Stored, list_tensors, write_file
from thinwire.config.sections import AdapterConfig, ModelConfig
from thinwire.hf.checkpointed import Checkpointed
from thinwire.hf.description import form_of, read_object
from thinwire.hf.links import has_file
from thinwire.hf.tokenizer import kept_notes, write_json
from thinwire.model.adapter import widen
from thinwire.model.adapter_targets import ALL, linear_names, target_layers
from thinwire.model.huggingface import PlainTensor, real_number, whole_number
from thinwire.model.names import split_block_name
from thinwire.model.stage import Stage

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What peft puts before the names of a model."""
NEEDED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    **dict.fromkeys(("use_dora", "use_rslora", "fan_in_fan_out", "lora_bias", "use_qalora"), (False, None)),
    **dict.fromkeys(("modules_to_save", "layers_to_transform", "layer_replication", "trainable_token_indices"), (None, [])),
    **dict.fromkeys(("target_parameters", "exclude_modules", "megatron_config", "corda_config", "eva_config"), (None, [])),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), ({}, None)),
}
"""What an adapter of ours is, in the words of its config; a word that is absent means the same."""
AGAIN = "download the adapter again, or write it with save_pretrained"


class Merged:
    """Make rows of W + (alpha / rank) B A in fp64."""

    def __init__(self, source: Checkpointed, entry: PlainTensor) -> None:
        assert entry.ours is not None
        tensors, place = source.tensors, entry.ours.removesuffix(".weight")
        self.held, self.scale = tensors[entry.ours], tensors.get(f"{place}.scale") if entry.ours.endswith(".weight") else None
        self.thin, self.tall = tensors.get(f"{place}.lora_A"), tensors.get(f"{place}.lora_B")
        self.factor = source.config.adapter.alpha / source.config.adapter.rank

    def rows(self, start: int, stop: int) -> Tensor:
        base = widen(self.held.rows(start, stop), None if self.scale is None else self.scale.rows(start, stop), torch.float64)
        if self.thin is None or self.tall is None:
            return base
        tall = self.tall.rows(start, stop).double()
        return base + self.factor * tall @ self.thin.whole().double() if bool(tall.any()) else base  # -0.0 + 0.0 would be 0.0


def merged_piece(source: Checkpointed, entry: PlainTensor, dtype: torch.dtype) -> Piece:
    """Return a tensor of the plain network that base and adapter make."""
    return Piece(entry.theirs, entry.shape, dtype, Merged(source, entry).rows)


def adapter_names(model: ModelConfig, adapter: AdapterConfig) -> dict[str, str]:
    """Return the matrices of an adapter: peft's names, and our global ones."""
    targets, found = {f"{name}.weight" for name in target_layers(model, adapter)}, {}
    for entry in form_of(model).tensors(model):
        ours = entry.ours or ""
        inner = split_block_name(ours)
        if inner is not None and inner[1] in targets:
            for letter in "AB":
                theirs = f"{PREFIX}{entry.theirs.removesuffix('.weight')}.lora_{letter}.weight"
                found[theirs] = f"{ours.removesuffix('.weight')}.lora_{letter}"
    return found


def write_adapter(folder: Path, source: Checkpointed) -> dict[str, str]:
    """Write the adapter of a run alone, as peft does; return the sha256 of its weights."""
    adapter, tensors = source.config.adapter, source.tensors
    names = adapter_names(source.config.model, adapter)
    table = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": kept_notes(source.run).get("name"),
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": sorted(target_layers(source.config.model, adapter).values()),
        "bias": "none",
        "inference_mode": True,
    }
    write_json(folder / CONFIG, table)
    pieces = [Piece(theirs, tensors[ours].shape, source.dtype, tensors[ours].rows) for theirs, ours in names.items()]
    return {WEIGHTS: write_file(folder / WEIGHTS, pieces)}


@dataclass(frozen=True)
class PeftAdapter:
    """A checked adapter of peft: the settings it stands for, and its matrices by our names."""

    folder: Path
    settings: AdapterConfig
    tensors: dict[str, Stored]

    @torch.no_grad()
    def fill(self, stage: Stage) -> None:
        """Copy the matrices of a stage into it."""
        state = stage.state_dict()
        for name, tensor in self.tensors.items():
            if name in state:
                state[name].copy_(tensor.whole())


def open_adapter(folder: Path, model: ModelConfig) -> PeftAdapter:
    """Open an adapter for a model, refusing by name what ours cannot be and what does not fit."""
    for name in (CONFIG, WEIGHTS):
        if not has_file(folder, name):
            raise ValueError(f"{folder} has no {name}; give the folder that peft's save_pretrained wrote, with safetensors")
    where, table = folder / CONFIG, read_object(folder / CONFIG)
    for word, allowed in NEEDED.items():
        if table.get(word, allowed[0]) not in allowed:
            raise ValueError(f"{where}: {word} is {table[word]!r}, an adapter here has {allowed[0]!r}; choose an adapter of plain LoRA")
    settings = adapter_settings(table, where, model)
    stored, names = list_tensors(folder / WEIGHTS, AGAIN), adapter_names(model, settings)
    if odd := sorted(stored.keys() ^ names.keys()):
        which = "lacks" if odd[0] in names else "holds"
        raise ValueError(f"{folder / WEIGHTS} {which} {odd[0]}, which does not go with {CONFIG} and the model; {AGAIN}")
    shapes = {entry.ours: entry.shape for entry in form_of(model).tensors(model)}
    for theirs, ours in names.items():
        outer, inner = shapes[f"{ours[: -len('.lora_A')]}.weight"]
        wanted, found = (settings.rank, inner) if ours.endswith("A") else (outer, settings.rank), stored[theirs]
        if found.shape != wanted or found.dtype is None or not found.dtype.is_floating_point:
            raise ValueError(f"{found.path}: {theirs} is {found.shape} {found.code}, the model calls for {wanted} floats; {AGAIN}")
        if not bool(torch.isfinite(found.whole()).all()):
            raise ValueError(f"{found.path}: {theirs} holds NaN or infinite values; take an adapter from before it diverged")
    return PeftAdapter(folder, settings, {ours: stored[theirs] for theirs, ours in names.items()})


def adapter_settings(table: dict[str, Any], where: Path, model: ModelConfig) -> AdapterConfig:
    """Return the settings that an adapter's config stands for."""
    rank, alpha = whole_number(table, "r", where), real_number(table, "lora_alpha", where)
    dropout, targets, known = table.get("lora_dropout") or 0.0, table.get("target_modules"), linear_names(model).values()
    if type(dropout) not in (int, float) or not 0 <= dropout < 1:
        raise ValueError(f"{where}: lora_dropout is {dropout!r}; it must be at least 0 and below 1: mend the file")
    if targets != ALL:
        words = targets if isinstance(targets, list) else [targets]
        last = {word.rpartition(".")[2] if isinstance(word, str) else word for word in words}
        if not last <= set(known):
            raise ValueError(f"{where}: target_modules is {targets!r}; the linear layers of a block are {', '.join(known)}: choose another")
        targets = ",".join(name for name in known if name in last)
    return AdapterConfig(rank=rank, alpha=alpha, dropout=float(dropout), targets=targets)
