"""Send few of the stream's values and leave the rest zero: the largest (`topk`), or randomly chosen ones (`randomk`).

Both are codecs of the study of activation compression by Bian et al. (arXiv 2301.02654): no rescaling of what is kept, no residual, and
the gradient comes back at the kept values only. For `topk` a mask without gradient says which values these are, on the wire as a bitmap
or as bit-packed positions, whichever is smaller. The study sends 64-bit positions, for `randomk` too, where here both ends draw the same
positions and none travel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from thinwire.bits.codes import pack_codes, packed_size, unpack_codes
from thinwire.bits.grid import FORMAT
from thinwire.bits.mask import fill, kept_count, no_gradient, pack_positions, pick, position_bytes, unpack_positions
from thinwire.bits.raw import Buffer, Direction, TensorSpec
from thinwire.codecs.base import Codec, LossyOptions, attach
from thinwire.codecs.masked import MaskEntry
from thinwire.config.sections import ModelConfig
from thinwire.model.cut import StagePlan
from thinwire.model.ends import Context
from thinwire.model.noise import sample_keys, uniform

VALUES, MASK = 0, 1
POSITIONS = int.from_bytes(b"positions")  # what a key is for, out of reach of the purposes that `noise` counts


@dataclass(frozen=True, kw_only=True)
class SparseOptions(LossyOptions):
    """Options of the codecs that send a fixed share of the values."""

    density: float = 0.1
    """Share of the values that is sent; at least one of each token, or sample, always is."""
    per: Literal["token", "sample"] = "token"
    """Choose among the values of each token, or of a whole sample. With `sample`, later tokens decide what an earlier token's state keeps,
    which leaks the future into a causal language model; it is there because it is closer to the published study."""


@dataclass(frozen=True)
class Groups:
    """A stream tensor as groups of values: the axes of the groups, the values of each, and how many of them are kept."""

    axes: tuple[int, ...]
    count: int
    kept: int

    @classmethod
    def of(cls, shape: tuple[int, ...], options: SparseOptions) -> Groups:
        """Divide a stream of that shape."""
        axes = tuple(shape[:-1] if options.per == "token" else shape[:1])
        count = math.prod(shape) // math.prod(axes)
        return cls(axes, count, kept_count(options.density, count))

    @property
    def rows(self) -> int:
        return math.prod(self.axes)

    @property
    def position_bytes(self) -> int:
        return position_bytes(self.rows * self.kept, self.count)

    @property
    def bitmap_bytes(self) -> int:
        return packed_size(self.rows * self.count, 1)

    def divide(self, tensor: Tensor) -> Tensor:
        """Return a tensor with a group's values along its last axis."""
        return tensor.reshape(*self.axes, self.count)

    def select(self, stream: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values at some positions of each group, in rising order, and the mask that says where they are."""
        mask = self.mark(positions).view(stream.shape)
        return pick(stream, mask, self.rows * self.kept).view(*self.axes, self.kept), mask

    def mark(self, positions: Tensor) -> Tensor:
        """Return a mask of the groups that is true at the positions."""
        return torch.zeros(*self.axes, self.count, dtype=torch.bool, device=positions.device).scatter_(-1, positions, True)


def check_density(density: float) -> None:
    """Refuse a share that is none."""
    if not 0 < density <= 1:
        raise ValueError(f"codec.density is {density}; choose a share of the values above 0 and up to 1, such as 0.1")


class TopKExit(nn.Module):
    """Send the values of each group that are largest in size, and a mask of where they are."""

    def __init__(self, options: SparseOptions, wire: torch.dtype) -> None:
        super().__init__()
        self.options, self.wire = options, wire

    def forward(self, stream: Tensor, ids_BT: Tensor, context: Context) -> tuple[Tensor, ...]:
        groups = Groups.of(stream.shape, self.options)
        positions = groups.divide(stream.detach().abs()).topk(groups.kept).indices  # NaN counts as the largest, so it is sent
        values, mask = groups.select(stream, positions)
        return values.to(self.wire), attach(mask.to(FORMAT), stream)


class TopK(Codec):
    """Send the largest values."""

    Options = SparseOptions
    options: SparseOptions
    integer_slots = frozenset({MASK})

    def __init__(self, options: SparseOptions, model: ModelConfig, *, seed: int = 0, compute: torch.dtype = torch.float32) -> None:
        super().__init__(options, model, seed=seed, compute=compute)
        self.by_token = options.per == "token"
        check_density(options.density)

    def ends(self, plan: StagePlan) -> tuple[nn.Module | None, nn.Module | None]:
        entry = None if plan.first else MaskEntry(self.compute)
        exit = None if plan.last else TopKExit(self.options, self.wire_dtype)
        return entry, exit

    def wire(self, source: TensorSpec) -> tuple[TensorSpec, ...]:
        groups = Groups.of(source.shape, self.options)
        values = TensorSpec.raw((*groups.axes, groups.kept), self.wire_dtype)
        return values, TensorSpec(source.shape, FORMAT, min(groups.position_bytes, groups.bitmap_bytes), 0)

    def pack(self, slot: int, tensor: Tensor, direction: Direction) -> bytes:
        if slot == VALUES:
            return super().pack(slot, tensor, direction)
        if direction == "backward":
            return b""
        groups = Groups.of(tensor.shape, self.options)
        by_position = groups.position_bytes < groups.bitmap_bytes
        return pack_positions(tensor.reshape(groups.rows, groups.count)) if by_position else pack_codes(tensor, 1)

    def unpack(self, slot: int, data: Buffer, spec: TensorSpec, direction: Direction) -> Tensor:
        if slot == VALUES:
            return super().unpack(slot, data, spec, direction)
        if direction == "backward":
            return no_gradient(data, spec)
        groups = Groups.of(spec.shape, self.options)
        if groups.position_bytes < groups.bitmap_bytes:
            return unpack_positions(data, torch.full((groups.rows,), groups.kept), groups.count).view(spec.shape)
        mask = unpack_codes(data, 1, spec)
        if (groups.divide(mask).count_nonzero(-1) != groups.kept).any():
            raise ValueError(f"payload of {len(data)} bytes where {groups.kept} ones in every {groups.count} bits were declared")
        return mask

    def error_bound(self, source: Tensor) -> None:
        """State no bound: a dropped value is its own error, and a quantiser behind this codec would state less."""


class Drawing:
    """The positions that both ends of a boundary draw."""

    def __init__(self, options: SparseOptions, layer: int, seed: int) -> None:
        self.options, self.layer, self.seed = options, layer, seed

    def positions(self, shape: tuple[int, ...], context: Context) -> tuple[Groups, Tensor]:
        """Return the kept positions in a stream of that shape: a function of seed, step, sample and layer alone."""
        groups = Groups.of(shape, self.options)
        keys_B = sample_keys(context.samples_B, POSITIONS, self.seed, context.step, self.layer)
        draws = groups.divide((uniform(keys_B, shape) * 2**24).long())
        # The position breaks ties between equal draws, so that all machines choose alike.
        ranks = draws * groups.count + torch.arange(groups.count, device=draws.device)
        return groups, ranks.topk(groups.kept, largest=False).indices


class RandomKExit(nn.Module):
    """Send the values at the positions drawn."""

    def __init__(self, drawing: Drawing, wire: torch.dtype) -> None:
        super().__init__()
        self.drawing, self.wire = drawing, wire

    def forward(self, stream: Tensor, ids_BT: Tensor, context: Context) -> tuple[Tensor, ...]:
        groups, positions = self.drawing.positions(stream.shape, context)
        values, _ = groups.select(stream, positions)
        # A value that is not finite may be among the dropped ones: it spoils those of its group that are sent.
        sound = groups.divide(stream.detach()).isfinite().all(-1, keepdim=True)
        return (values.where(sound, torch.nan).to(self.wire),)


class RandomKEntry(nn.Module):
    """Put the values received at the positions drawn."""

    def __init__(self, drawing: Drawing, width: int, compute: torch.dtype) -> None:
        super().__init__()
        self.drawing, self.width, self.compute = drawing, width, compute

    def forward(self, payload: tuple[Tensor, ...], ids_BT: Tensor, context: Context) -> Tensor:
        shape = (*ids_BT.shape, self.width)
        groups, positions = self.drawing.positions(shape, context)
        return fill(groups.mark(positions).view(shape), payload[0].to(self.compute))


class RandomK(Codec):
    """Send values at random positions, drawn anew at every step."""

    Options = SparseOptions
    options: SparseOptions
    by_token = False  # positions are drawn for a whole sample

    def __init__(self, options: SparseOptions, model: ModelConfig, *, seed: int = 0, compute: torch.dtype = torch.float32) -> None:
        super().__init__(options, model, seed=seed, compute=compute)
        check_density(options.density)

    def ends(self, plan: StagePlan) -> tuple[nn.Module | None, nn.Module | None]:
        before, behind = (Drawing(self.options, layer, self.seed) for layer in (plan.layers.start, plan.layers.stop))
        entry = None if plan.first else RandomKEntry(before, self.width, self.compute)
        exit = None if plan.last else RandomKExit(behind, self.wire_dtype)
        return entry, exit

    def wire(self, source: TensorSpec) -> tuple[TensorSpec, ...]:
        groups = Groups.of(source.shape, self.options)
        return (TensorSpec.raw((*groups.axes, groups.kept), self.wire_dtype),)

    def error_bound(self, source: Tensor) -> None:
        """State no bound: a dropped value is its own error, and a quantiser behind this codec would state less."""
