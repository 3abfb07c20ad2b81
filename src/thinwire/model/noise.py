"""Counter-based random bits: the same on every machine, whatever the cut of the model or the order of work.

Everything random after initialisation (frozen token features, stochastic rounding, dropout) is a pure function of integers such as
(seed, step, sample, layer, element). Nothing here is cryptographic.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

# What a key is for, so that two uses never draw the same numbers.
FIXED, ROUNDING, BRANCH, OUTPUT, ADAPTER = range(5)

_MASK = 0xFFFFFFFF
# Multipliers below 2^31: a 32-bit value times one of them fits in int64, so no platform's overflow rule is involved.
_FIRST, _SECOND = 0x7FEB352D, 0x79027297


def mix(bits: Tensor) -> Tensor:
    """Scramble int64 values in [0, 2^32) into well-mixed values of the same range."""
    bits = bits ^ (bits >> 16)
    bits = bits.mul_(_FIRST).bitwise_and_(_MASK)
    bits ^= bits >> 15
    bits = bits.mul_(_SECOND).bitwise_and_(_MASK)
    bits ^= bits >> 16
    return bits


def key(*values: int) -> int:
    """Fold integers into one 32-bit key; the order matters."""
    digest = hashlib.blake2b(b"".join(value.to_bytes(16, "little", signed=True) for value in values), digest_size=4)
    return int.from_bytes(digest.digest(), "little")


def sample_keys(samples_B: Tensor, *values: int) -> Tensor:
    """Return one 32-bit key per sample from its global index and shared integers."""
    low, high = samples_B & _MASK, (samples_B >> 32) & _MASK
    return mix((mix((low + key(*values)) & _MASK) + high) & _MASK)


def uniform(keys_B: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Draw float32 numbers in [0, 1) of `shape` (one row per key): a function of key and position alone."""
    position = mix(torch.arange(math.prod(shape[1:]), device=keys_B.device))
    bits = mix((position[None, :] + keys_B[:, None]) & _MASK)
    return ((bits >> 8).to(torch.float32) * 2.0**-24).view(shape)
