"""The model seam: what an architecture declares of its block, so that nothing else knows a parameter of it by name.

A model is an embedding, `model.layers` blocks on a residual stream, a norm and a head. Embedding, head and the cut are the stage's
(`model/stage.py`); the block, the norm and the tables of positions are the architecture's. An architecture has no state: it is made anew
wherever it is asked for (`find_architecture`), and each method depends on its arguments alone. Names are those inside a block, such as
`attention.output.weight`. `tests/model/test_architectures.py` holds every registered architecture to what is said here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from thinwire.config.registry import ARCHITECTURES
from thinwire.config.sections import ModelConfig
from thinwire.model.names import block_name

if TYPE_CHECKING:  # a supervisor asks for the count without torch
    from torch import Tensor, nn

    from thinwire.model.huggingface import HuggingFace


INGREDIENTS: tuple[str, ...] = (
    "head_dim",
    "ffn_kind",
    "rope_kind",
    "window",
    "qk_norm",
    "attention_bias",
    "ffn_bias",
    "output_bias",
    "output_dropout",
    "norm_reorder",
    "branch_norm_gains",
    "separator",
)
"""Settings of `[model]` that an architecture may have or not; those that shape embedding and head are the stage's, so all have them."""


@dataclass(frozen=True)
class Units:
    """Parts of a block that work side by side, such as heads or neurons, so that each can be taken out on its own."""

    name: str
    count: int
    axes: Mapping[str, int]
    """For each parameter that consists of units, its axis along which they lie: equal runs of indices, in order.

    A unit whose numbers are all zero writes nothing, and the gradients of its numbers are zero.
    """


class Architecture:
    """A kind of decoder."""

    huggingface: HuggingFace | None = None
    """How its networks are written as Hugging Face folders; None: not at all, and import and export refuse it by name."""

    def check(self, model: ModelConfig) -> None:
        """Raise ValueError for settings that it cannot have: the value, the limit, the fix; see `refuse_ingredients`."""

    def block(self, model: ModelConfig, layer: int, width: int, last_width: int) -> nn.Module:
        """Make a block on a stream that is `width` wide: model.width, or fewer coordinates.

        Its forward(stream, read, each) gets the stream, a function `read` that makes the hidden state, model.width wide, of a stream,
        and a `Pass`; it returns the stream with what its branches add. The last branch writes the first `last_width` channels, and
        the others are dropped. Matrices are drawn, and biases set to zero, by the stage; all else stays as it is made here, so it must
        not be random.
        """
        raise NotImplementedError

    def norm(self, model: ModelConfig) -> nn.Module:
        """Make the norm in front of the head."""
        raise NotImplementedError

    def tables(self, model: ModelConfig, positions: range) -> tuple[Tensor, ...]:
        """Compute in fp64 what blocks know of positions, a row for each; they come back in `Pass.tables`, in the compute format.

        The end of the positions is the length of the sequence so far, on which they may depend.
        """
        return ()

    def writers(self, model: ModelConfig) -> Mapping[str, int]:
        """Name the parameters that write into the stream, with the axis that is as wide as it.

        All that a block adds to the stream goes through them, linearly: with all of them zero it adds nothing. A codec that constrains
        the stream holds them as coordinates.
        """
        raise NotImplementedError

    def leaving(self, model: ModelConfig) -> list[str]:
        """Name the settings in use that put something into the stream that is not in the span of the writers' columns."""
        return []

    def units(self, model: ModelConfig) -> Sequence[Units]:
        """List the kinds of units of a block; no parameter belongs to two. None: independent subnets (`ist`) refuse it."""
        return ()

    def linear_layers(self, model: ModelConfig) -> Sequence[str]:
        """Name the modules of a block that are `nn.Linear`, such as `attention.query`; what is not named gets no adapter."""
        return ()

    def count(self, model: ModelConfig, layers: int) -> int:
        """Count the parameters of so many layers, free of any codec, with embedding, norm and head."""
        raise NotImplementedError

    def cost(self, model: ModelConfig, context: int) -> int:
        """Count the multiplications that one token takes in a block's forward, as the mean over a sequence of so many."""
        raise NotImplementedError

    def stream_axes(self, model: ModelConfig, layers: range) -> dict[str, int]:
        """Name the writers of some layers by their global names, with their axes."""
        return {block_name(layer, name): axis for layer in layers for name, axis in self.writers(model).items()}


def refuse_ingredients(model: ModelConfig, has: Collection[str], title: str) -> None:
    """Raise ValueError for an ingredient in use that an architecture does not have: for its `check`."""
    defaults = {entry.name: entry.default for entry in fields(ModelConfig)}
    for name in INGREDIENTS:
        if name not in has and (value := getattr(model, name)) != defaults[name]:
            raise ValueError(f"model.{name} is {value}, which {title} does not have; leave it out")


def find_architecture(name: str) -> Architecture:
    """Return the architecture of that name, built in or of another package (entry point group `thinwire.architectures`)."""
    return ARCHITECTURES.load(name)()
