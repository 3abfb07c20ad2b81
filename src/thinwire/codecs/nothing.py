"""The control: nothing crosses but token ids, forward, and each stage begins from its own anchors.

It is `anchored` with K = 0. The payload has no channel, so it takes no byte, and its gradient is zero: the last stage learns alone, and
the others stay as they began, but for weight decay. What a codec ends below this is what its wire is worth.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thinwire.bits.raw import TensorSpec
from thinwire.codecs.anchored import Anchor, AnchoredEntry, AnchoredExit, AnchorOptions, check_anchors
from thinwire.codecs.base import Codec
from thinwire.codecs.projector import Channels
from thinwire.config.sections import ModelConfig
from thinwire.model.cut import StagePlan


class Nothing(Codec):
    """Send a payload without channels."""

    Options = AnchorOptions
    options: AnchorOptions
    owns_bits = True  # there is nothing to quantise

    def __init__(self, options: AnchorOptions, model: ModelConfig, *, seed: int = 0, compute: torch.dtype = torch.float32) -> None:
        super().__init__(options, model, seed=seed, compute=compute)
        check_anchors(options)
        if options.bits is not None:
            raise ValueError(f"codec.bits is {options.bits}, but `nothing` sends no values; leave codec.bits unset")

    def ends(self, plan: StagePlan) -> tuple[nn.Module | None, nn.Module | None]:
        first, none = plan.layers.start, Channels(self.model.width, 0)
        entry = None if plan.first else AnchoredEntry(none, Anchor(self.options, self.model, first, self.seed), self.compute)
        return entry, None if plan.last else AnchoredExit(none, self.wire_dtype)

    def error_bound(self, source: Tensor) -> None:
        """State no bound: nothing of it arrives."""

    def wire(self, source: TensorSpec) -> tuple[TensorSpec, ...]:
        return (TensorSpec.raw((*source.shape[:-1], 0), self.wire_dtype),)
