"""What a stage gives to its blocks, whatever their architecture: tables of positions, dropout, and the KV cache of what was read before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.model.documents import Documents
from thinwire.model.noise import sample_keys, uniform


@dataclass(frozen=True)
class Pass:
    """What every block of a stage is given for one microbatch."""

    tables: tuple[Tensor, ...]
    """What the architecture's `tables` made for these positions, or for more: the first T rows are meant."""
    dropout: Callable[[Tensor, float, int, int], Tensor]
    cache: KVCache | None = None
    """What was read before, when text is written token by token; none in training, where a sequence is read as a whole."""
    documents: Documents | None = None
    """Where documents begin, if `model.separator` keeps them apart; rows of `tables` are then those of places in a document."""


class KVCache:
    """Keys and values of the tokens a stage has read, by layer, and the tokens' ids. Of one sequence, or several of equal length."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.ids_BT = torch.empty(1, 0, dtype=torch.int64, device=device)
        self.heads: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        """Return how many tokens have been read."""
        return self.ids_BT.shape[1]

    def extend(self, layer: int, key_BNTS: Tensor, value_BNTS: Tensor) -> tuple[Tensor, Tensor]:
        """Add the next tokens' keys and values of a layer; return all there are."""
        if layer in self.heads:
            before = self.heads[layer]
            key_BNTS, value_BNTS = torch.cat((before[0], key_BNTS), dim=2), torch.cat((before[1], value_BNTS), dim=2)
        self.heads[layer] = key_BNTS, value_BNTS
        return key_BNTS, value_BNTS

    def read(self, ids_BT: Tensor) -> None:
        """Remember the ids whose keys and values are there; what was added behind them, to fill up a chunk, is forgotten."""
        self.ids_BT = torch.cat((self.ids_BT.expand(len(ids_BT), -1), ids_BT), dim=1)
        self.heads = {layer: (key[:, :, : self.length], value[:, :, : self.length]) for layer, (key, value) in self.heads.items()}


class Dropout:
    """Dropout drawn from (seed, step, sample, layer): the same numbers whatever the cut or the microbatches."""

    def __init__(self, seed: int, step: int, samples_B: Tensor, training: bool) -> None:
        self.seed, self.step, self.samples_B, self.training = seed, step, samples_B, training

    def __call__(self, values: Tensor, rate: float, purpose: int, layer: int) -> Tensor:
        if not self.training or rate == 0:
            return values
        keys_B = sample_keys(self.samples_B, purpose, self.seed, self.step, layer)
        return values * (uniform(keys_B, values.shape) >= rate).to(values.dtype) / (1 - rate)
