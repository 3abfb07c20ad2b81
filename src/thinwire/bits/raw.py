"""Tensors as bytes: the form of one on the wire, and its memory as it lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from thinwire.util.device import to_host

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
    return to_host(tensor.detach()).contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def from_raw_bytes(data: Buffer, spec: TensorSpec) -> Tensor:
    """Make a tensor of the given form from its memory."""
    expected = math.prod(spec.shape) * spec.dtype.itemsize
    if len(data) != expected:
        raise ValueError(f"payload of {len(data)} bytes where {expected} were declared for shape {spec.shape} {spec.dtype}")
    return numbers(data, spec.dtype, spec.shape)


def numbers(data: Buffer, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Copy bytes into memory of torch's own: results must not depend on how a message happened to be aligned."""
    found = torch.empty(tuple(shape), dtype=dtype)
    found.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8)
    return found


def pack_front(values: Tensor) -> bytes:
    """Store values up to the last one that is not zero."""
    data = raw_bytes(values)
    used = len(data.rstrip(b"\0"))
    return data[: used + -used % values.dtype.itemsize]


def unpack_front(data: Buffer, spec: TensorSpec) -> Tensor:
    """Take values out of their bytes and put the zeros behind them back."""
    most = math.prod(spec.shape) * spec.dtype.itemsize
    if len(data) > most or len(data) % spec.dtype.itemsize:
        raise ValueError(f"payload of {len(data)} bytes where up to {most} were declared for values of {spec.dtype.itemsize} bytes")
    return from_raw_bytes(bytes(data).ljust(most, b"\0"), spec)


def split_sizes(data: bytes, sizes: Sequence[int], peer: int) -> list[memoryview]:
    """Cut a message into parts of known sizes; refuse one of another length."""
    if len(data) != sum(sizes):
        raise ValueError(f"replica {peer} sent {len(data)} bytes where {sum(sizes)} were expected; the replicas have lost step")
    view, parts, start = memoryview(data), [], 0
    for size in sizes:
        parts.append(view[start : start + size])
        start += size
    return parts
