"""The anchored boundary (MAPL, arXiv 2606.05484): layers stay free, each boundary has a K-wide projector and each stage its own anchors.

A stage adds what it knows of the tokens by itself, a_p[t], at its input and takes it away at its output, so that only what the layers
have written has to cross:

    send      Z = (X - a_p[t]) A_p                 K numbers per token
    receive   X = Z A_p^T + a_{p+1}[t]

The first stage's anchor is its embedding. Two choices of our own:

* `channels`: all boundaries cut the same K channels, so what one stage sends reaches every later one unless a layer overwrites it. With
  another random projector at each boundary a share of K/D of it survives each crossing.
* Every anchor starts as the embedding does (all stages can draw it from the seed): at the first step no token feature is lost.

Anchors may also know the tokens before (`ngrams`): ids ride along anyway, so this costs no byte.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.bits.raw import TensorSpec
from thinwire.codecs.base import Codec, CodecOptions, check_width
from thinwire.codecs.projector import Channels, Frozen, Learned
from thinwire.config.sections import ModelConfig
from thinwire.model.cut import StagePlan
from thinwire.model.documents import places_in_documents
from thinwire.model.ends import Context
from thinwire.model.initial import EMBEDDING_STD, draw_normal
from thinwire.model.names import EMBEDDING
from thinwire.model.noise import key, mix
from thinwire.model.subspace.basis import random_basis


@dataclass(frozen=True, kw_only=True)
class AnchorOptions(CodecOptions):
    """Options of what a stage knows of the tokens by itself."""

    anchors: Literal["full", "factorised"] = "full"
    """A trainable row of D numbers per token, or frozen rows plus a trainable product of rank `anchor_rank`."""
    anchor_rank: int = 32
    """Inner width of factorised anchors and of n-gram anchors."""
    ngrams: int = 1
    """Longest run of tokens an anchor knows: 1 is the token alone, 2 adds hashed pairs, 3 hashed triples."""
    buckets: int = 65536
    """Rows of each table of hashed n-grams."""
    ngram_gain: float = 1.0
    """Size of the matrices that widen n-gram anchors, which is how fast these move."""


@dataclass(frozen=True, kw_only=True)
class AnchoredOptions(AnchorOptions):
    """Options of the anchored boundary."""

    rank: int = 16
    """Numbers per token, K; at most the model width."""
    projector: Literal["channels", "fixed", "learned"] = "channels"
    """A_p: the first K channels, a random orthonormal matrix per boundary, or one that is learned on the Stiefel manifold."""
    projector_rate: float = 0.01
    """Step length of a learned projector, relative to its own size."""
    projector_every: int = 10
    """Steps between updates of a learned projector: each takes 8 D K bytes."""


class Anchor(nn.Module):
    """What a stage knows of each token without any wire."""

    start_VD: Tensor | None

    def __init__(self, options: AnchorOptions, model: ModelConfig, layer: int, seed: int) -> None:
        super().__init__()
        start_VD = draw_normal(seed, EMBEDDING, (model.vocabulary, model.width)) * EMBEDDING_STD
        full = options.anchors == "full"
        self.rows = nn.Parameter(start_VD if full else torch.zeros(model.vocabulary, options.anchor_rank))
        self.register_buffer("start_VD", None if full else start_VD, persistent=False)
        name = f"entries.{layer}.anchor"
        spread = options.anchor_rank**-0.5
        self.widen = None if full else nn.Parameter(draw_normal(seed, f"{name}.widen", (options.anchor_rank, model.width)) * spread)
        self.ngrams = nn.ParameterList(torch.zeros(options.buckets, options.anchor_rank) for _ in range(options.ngrams - 1))
        self.widen_ngrams = nn.ParameterList(
            draw_normal(seed, f"{name}.widen_ngrams.{index}", (options.anchor_rank, model.width)) * spread * options.ngram_gain
            for index in range(options.ngrams - 1)
        )
        self.key, self.separator = key(seed, layer), model.separator

    def forward(self, ids_BT: Tensor, before_BT: Tensor | None = None) -> Tensor:
        if before_BT is not None and len(self.ngrams):
            joined_BT = torch.cat((before_BT[:, -len(self.ngrams) :], ids_BT), dim=1)
            return self(joined_BT)[:, -ids_BT.shape[1] :]
        anchor_BTD = functional.embedding(ids_BT, self.rows)
        if self.widen is not None:
            assert self.start_VD is not None
            anchor_BTD = anchor_BTD @ self.widen + functional.embedding(ids_BT, self.start_VD)
        # Each round folds one more token before into the hash; a place before the sequence counts as a token of its own.
        hashed_BT = mix((ids_BT + self.key) & 0xFFFFFFFF)
        places_BT = None if self.separator is None else places_in_documents(ids_BT, self.separator)
        for distance, (rows, widen) in enumerate(zip(self.ngrams, self.widen_ngrams, strict=True), start=1):
            before_BT = functional.pad(ids_BT, (distance, 0), value=-1)[:, : ids_BT.shape[1]]
            if places_BT is not None:  # so does one of another document
                before_BT = before_BT.masked_fill(places_BT < distance, -1)
            hashed_BT = mix((hashed_BT + (before_BT + 2) * 0x9E3779) & 0xFFFFFFFF)
            anchor_BTD = anchor_BTD + functional.embedding(hashed_BT % len(rows), rows) @ widen
        return anchor_BTD


class AnchoredExit(nn.Module):
    """Send the coordinates of what the stage has written."""

    def __init__(self, projector: Channels | Frozen | Learned, wire: torch.dtype) -> None:
        super().__init__()
        self.projector = projector
        self.wire = wire

    def forward(self, stream: Tensor, ids_BT: Tensor, context: Context) -> tuple[Tensor, ...]:
        anchor = context.kept.get("anchor", context.kept.get("embedded"))
        written = stream if anchor is None else stream - anchor
        return (self.projector.narrow(written).to(self.wire),)


class AnchoredEntry(nn.Module):
    """Put coordinates back into place and add this stage's anchor."""

    def __init__(self, projector: Channels | Frozen | Learned, anchor: Anchor, compute: torch.dtype) -> None:
        super().__init__()
        self.projector, self.anchor = projector, anchor
        self.compute = compute

    def forward(self, payload: tuple[Tensor, ...], ids_BT: Tensor, context: Context) -> Tensor:
        anchor = context.kept["anchor"] = self.anchor(ids_BT, context.before_BT)
        return (self.projector.widen(payload[0].to(self.compute)) + anchor).to(self.compute)


def check_positive(options: CodecOptions, *names: str) -> None:
    """Refuse counts below 1."""
    for name in names:
        if getattr(options, name) < 1:
            raise ValueError(f"codec.{name} is {getattr(options, name)}; choose 1 or more")


def check_anchors(options: AnchorOptions) -> None:
    """Refuse anchors that cannot be."""
    check_positive(options, "anchor_rank", "ngrams", "buckets")
    if not 0 < options.ngram_gain < math.inf:
        raise ValueError(f"codec.ngram_gain is {options.ngram_gain}; choose a number above 0, 1 is usual")


class Anchored(Codec):
    """Send K coordinates of what a stage adds to its anchor."""

    Options = AnchoredOptions
    options: AnchoredOptions

    def __init__(self, options: AnchoredOptions, model: ModelConfig, *, seed: int = 0, compute: torch.dtype = torch.float32) -> None:
        super().__init__(options, model, seed=seed, compute=compute)
        check_width("rank", options.rank, model)
        check_anchors(options)
        check_positive(options, "projector_every")
        if not 0 < options.projector_rate < 1:
            raise ValueError(f"codec.projector_rate is {options.projector_rate}; choose a number between 0 and 1, such as 0.01")

    def projector(self, layer: int) -> Channels | Frozen | Learned:
        """Make the projector of the boundary in front of a layer."""
        width, rank = self.model.width, self.options.rank
        if self.options.projector == "channels":
            return Channels(width, rank)
        weight_DK = random_basis(width, rank, key(self.seed, layer)).to(self.compute)
        return Learned(weight_DK, self.options.projector_rate) if self.options.projector == "learned" else Frozen(weight_DK)

    def shares_after(self, step: int) -> bool:
        return self.options.projector == "learned" and (step + 1) % self.options.projector_every == 0

    def ends(self, plan: StagePlan) -> tuple[nn.Module | None, nn.Module | None]:
        first, behind = plan.layers.start, plan.layers.stop
        entry = None
        if not plan.first:
            entry = AnchoredEntry(self.projector(first), Anchor(self.options, self.model, first, self.seed), self.compute)
        exit = None if plan.last else AnchoredExit(self.projector(behind), self.wire_dtype)
        return entry, exit

    def error_bound(self, source: Tensor) -> None:
        return None

    def wire(self, source: TensorSpec) -> tuple[TensorSpec, ...]:
        return (TensorSpec.raw((*source.shape[:-1], self.options.rank), self.wire_dtype),)
