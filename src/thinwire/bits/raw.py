"""Tensors as bytes: the form of one on the wire, and its memory as it lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Direction = Literal["forward", "backward"]
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class TensorSpec:
    """One payload tensor: its form in the graph and its most bytes on the wire, per direction."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    forward_bytes: int
    backward_bytes: int
    exact: bool = True
    """Whether it always takes that many bytes, or any number up to them."""
    usual: float = 1.0
    """Share of those bytes that it usually takes: what a schedule reckons with."""

    @classmethod
    def raw(cls, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
        """Describe a tensor that travels as it lies in memory, its gradient likewise."""
        size = math.prod(shape) * dtype.itemsize
        return cls(tuple(shape), dtype, size, size)

    def size(self, direction: Direction) -> int:
        return self.forward_bytes if direction == "forward" else self.backward_bytes


def raw_bytes(tensor: Tensor) -> bytes:
    """Return a tensor's memory as little-endian bytes."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def from_raw_bytes(data: Buffer, spec: TensorSpec) -> Tensor:
    """Make a tensor of the given form from its memory."""
    expected = math.prod(spec.shape) * spec.dtype.itemsize
    if len(data) != expected:
        raise ValueError(f"payload of {len(data)} bytes where {expected} were declared for shape {spec.shape} {spec.dtype}")
    return torch.frombuffer(bytearray(data), dtype=spec.dtype).view(spec.shape)


def split_sizes(data: bytes, sizes: Sequence[int], peer: int) -> list[memoryview]:
    """Cut a message into parts of known sizes; refuse one of another length."""
    if len(data) != sum(sizes):
        raise ValueError(f"replica {peer} sent {len(data)} bytes where {sum(sizes)} were expected; the replicas have lost step")
    view, parts, start = memoryview(data), [], 0
    for size in sizes:
        parts.append(view[start : start + size])
        start += size
    return parts
