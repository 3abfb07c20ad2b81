"""A run's network as a plain Hugging Face one: whether it is one, and its weights (method, section 4: export).

    W = U Z for all that writes into the stream      embedding = fixed[t] + U e_t      everything else as it is

Whether a codec changes the network is asked of the codec that was built, not of its name.
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

import torch
from torch import Tensor

from thinwire.checkpoint.fitting import shape_and_format
from thinwire.checkpoint.safetensors import Piece, Stored
from thinwire.codecs.base import Codec
from thinwire.config.sections import ModelConfig, RunConfig
from thinwire.hf.adapter import merged_piece
from thinwire.hf.checkpointed import Checkpointed
from thinwire.hf.description import form_of
from thinwire.model.architecture import find_architecture
from thinwire.model.cut import StagePlan, constrained_layers, cut_layers
from thinwire.model.huggingface import PlainTensor
from thinwire.model.initial import OwnGenerator
from thinwire.model.names import EMBEDDING
from thinwire.model.stream import Stream
from thinwire.model.subspace.stream import SubspaceStream
from thinwire.pipeline.inprocess import build_codec


def plans_of(config: RunConfig) -> list[StagePlan]:
    """List the stages of a run."""
    ranges = cut_layers(config.model.layers, config.pipeline.stages, config.pipeline.split)
    return [StagePlan(index, len(ranges), layers) for index, layers in enumerate(ranges)]


def lean_codec(config: RunConfig) -> Codec:
    """Build the codec without a table of frozen features: it is only a cache."""
    if any(entry.name == "fixed_cache_mb" for entry in fields(config.codec)):
        config = replace(config, codec=replace(config.codec, fixed_cache_mb=0.0))
    return build_codec(config)


def why_not_plain(config: RunConfig) -> str | None:
    """Say why no plain Hugging Face model computes what this network does, or return None if one does."""
    form = find_architecture(config.model.architecture).huggingface
    if form is None:
        return f"the architecture {config.model.architecture!r} declares no Hugging Face form"
    if reason := form.why_not(config.model):
        return reason
    codec, plans, name = lean_codec(config), plans_of(config), config.codec.name
    stream = codec.stream(plans[0])
    if type(stream) not in (Stream, SubspaceStream):
        return f"the blocks read the residual stream in a way of their own (codec {name!r}, {type(stream).__name__})"
    if type(stream) is Stream and codec.width != config.model.width:
        return f"the residual stream is {codec.width} wide, the model {config.model.width} (codec {name!r})"
    if len(plans) > 1 and codec.sent_width != codec.width:
        return f"the last block in front of a boundary writes only {codec.sent_width} of {codec.width} channels (codec {name!r})"
    for before, behind in pairwise(plans):
        boundary = codec.at(behind.layers.start)
        with OwnGenerator(0):
            ends = {"entry": boundary.ends(behind)[0], "exit": boundary.ends(before)[1]}
        for kind, end in ends.items():
            learned = [label for label, _ in end.named_parameters()] if end is not None else []
            if learned:
                return f"the boundaries learn too, so they are layers of the network (codec {name!r}, {kind} {learned[0]})"
    return None


def pieces(source: Checkpointed, dtype: torch.dtype) -> list[Piece]:
    """List the tensors of the plain network, to be made row by row in fp64 and written as `dtype`."""
    config, tensors = source.config, source.tensors
    codec, plans = lean_codec(config), plans_of(config)
    constrained = constrained_layers(config.model, [plan.layers for plan in plans]) if codec.constrains else 0
    stream = codec.stream(plans[0])
    if isinstance(stream, SubspaceStream):
        stream.adopt(stored(source, tensors, "stream.basis_DK", tuple(stream.basis_DK.shape)).whole())
    axes = bound_axes(config.model, constrained) if isinstance(stream, SubspaceStream) else {}
    made = []
    for entry in form_of(config.model).tensors(config.model):
        axis = axes.get(entry.ours or "")
        if config.adapter.rank and entry.ours is not None:
            made.append(merged_piece(source, entry, dtype))
        elif axis is None:
            made.append(as_it_is(source, tensors, entry, dtype))
        else:
            made.append(Widened(source, tensors, entry, stream, axis).piece(dtype))
    return made


def bound_axes(model: ModelConfig, constrained: int) -> dict[str, int]:
    """Name what is held in coordinates where so many layers are constrained, with the axis that is as wide as the stream."""
    return {EMBEDDING: 1} | find_architecture(model.architecture).stream_axes(model, range(constrained))


def stored(source: Checkpointed, tensors: dict[str, Stored], name: str, shape: tuple[int, ...]) -> Stored:
    """Find a tensor of the checkpoint and check its shape and number format."""
    there, here = shape_and_format(tensors.get(name)), shape_and_format(torch.empty(shape, dtype=source.dtype, device="meta"))
    if there != here:
        raise ValueError(f"{source.folder} does not fit the run's settings: {name} is {there} there, {here} by config.toml")
    return tensors[name]


def as_it_is(source: Checkpointed, tensors: dict[str, Stored], entry: PlainTensor, dtype: torch.dtype) -> Piece:
    """Take a tensor over; a bias that we do not have is zero."""
    if entry.ours is None:
        return Piece(entry.theirs, entry.shape, dtype, lambda start, stop: torch.zeros(stop - start))
    return Piece(entry.theirs, entry.shape, dtype, stored(source, tensors, entry.ours, entry.shape).rows)


class Widened:
    """Make D-wide rows or columns from coordinates: U Z, Z U^T, or fixed[t] + U e_t for the embedding."""

    def __init__(self, source: Checkpointed, tensors: dict[str, Stored], entry: PlainTensor, stream: Stream, axis: int) -> None:
        assert isinstance(stream, SubspaceStream) and entry.ours is not None
        self.entry, self.stream = entry, stream
        self.basis_DK = stream.basis_DK.double()
        rank = self.basis_DK.shape[1]
        shape = (entry.shape[0], rank) if axis == 1 else (rank, *entry.shape[1:])
        self.coordinates = stored(source, tensors, entry.ours, shape)
        self.rows = self.embedding if entry.ours == EMBEDDING else self.columns if axis == 1 else self.matrix

    def piece(self, dtype: torch.dtype) -> Piece:
        return Piece(self.entry.theirs, self.entry.shape, dtype, self.rows)

    def matrix(self, start: int, stop: int) -> Tensor:
        """Return rows of U Z, or of U b."""
        return self.basis_DK[start:stop] @ self.coordinates.whole().double()

    def columns(self, start: int, stop: int) -> Tensor:
        """Return rows of Z U^T."""
        return self.coordinates.rows(start, stop).double() @ self.basis_DK.T

    def embedding(self, start: int, stop: int) -> Tensor:
        """Return rows of fixed + E U^T."""
        return self.stream.fixed.add_to(self.columns(start, stop), torch.arange(start, stop))
