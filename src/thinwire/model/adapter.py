"""LoRA: a stage whose weights are frozen, with two thin matrices beside chosen linear layers: W x + (alpha / rank) B A x.

The frozen matrices keep their global names, and may be held in fewer bits than they are computed with. Beside a matrix
`layers.0.attention.query.weight` stand `...query.lora_A` (rank x in) and `...query.lora_B` (out x rank).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.config.sections import AdapterConfig
from thinwire.model.adapter_targets import target_layers
from thinwire.model.initial import draw_normal
from thinwire.model.names import block_name
from thinwire.model.noise import ADAPTER

if TYPE_CHECKING:
    from thinwire.model.stage import Stage

INT8_LARGEST = 127


def hold(weight: Tensor, form: str | None) -> tuple[Tensor, Tensor | None]:
    """Return a matrix as it is held, and the scale of each row if it is in 8 bits."""
    if form == "bf16":
        return weight.bfloat16(), None
    if form != "int8":
        return weight, None
    scale_O1 = weight.abs().amax(1, keepdim=True) / INT8_LARGEST
    codes = (weight / scale_O1.clamp_min(torch.finfo(weight.dtype).tiny)).round_()
    return codes.to(torch.int8), scale_O1


def widen(held: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a held matrix, or rows of it, in the format that is computed with."""
    return held.to(dtype) if scale is None else held.to(dtype) * scale.to(dtype)


class HeldProduct(torch.autograd.Function):
    """Multiply by a held matrix; it is widened once more in backward, so that no wide copy waits there."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, held: Tensor, scale: Tensor | None) -> Tensor:
        ctx.save_for_backward(held, scale)
        return functional.linear(inputs, widen(held, scale, inputs.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,), (held, scale) = gradients, ctx.saved_tensors
        return gradient @ widen(held, scale, gradient.dtype), None, None


def fixed(tensor: Tensor | None) -> nn.Parameter | None:
    """Return a tensor as a parameter that is not trained."""
    return None if tensor is None else nn.Parameter(tensor.detach(), requires_grad=False)


class FrozenLinear(nn.Module):
    """A linear layer that is not trained."""

    weight: nn.Parameter

    def __init__(self, linear: nn.Linear, form: str | None) -> None:
        super().__init__()
        held, scale = hold(linear.weight.detach(), form)
        self.weight, self.scale, self.bias = nn.Parameter(held, requires_grad=False), fixed(scale), fixed(linear.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        kind = inputs.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inputs.dtype
        if self.weight.dtype in (inputs.dtype, dtype):
            return functional.linear(inputs, self.weight, self.bias)
        output = HeldProduct.apply(inputs.to(dtype), self.weight, self.scale)
        return output if self.bias is None else output + self.bias.to(dtype)


class AdaptedLinear(FrozenLinear):
    """A frozen linear layer with an adapter."""

    drop: Callable[[Tensor, float, int, int], Tensor]
    """The dropout of the microbatch under way; the stage puts it here."""

    def __init__(self, linear: nn.Linear, adapter: AdapterConfig, number: int, initial_RI: Tensor) -> None:
        """Put an adapter that adds nothing yet beside a layer; `number` tells its dropout from that of others."""
        super().__init__(linear, adapter.base_format)
        self.factor, self.rate, self.number = adapter.alpha / adapter.rank, adapter.dropout, number
        self.lora_A = nn.Parameter(initial_RI.to(linear.weight))
        self.lora_B = nn.Parameter(linear.weight.new_zeros(len(linear.weight), adapter.rank))

    def forward(self, inputs: Tensor) -> Tensor:
        thin = functional.linear(self.drop(inputs, self.rate, ADAPTER, self.number), self.lora_A)
        return super().forward(inputs) + functional.linear(thin, self.lora_B) * self.factor


class FrozenEmbedding(nn.Module):
    """A table of embeddings that is not trained."""

    weight: nn.Parameter

    def __init__(self, weight_VD: Tensor, form: str | None) -> None:
        super().__init__()
        held, scale = hold(weight_VD.detach(), form)
        self.weight, self.scale, self.dtype = nn.Parameter(held, requires_grad=False), fixed(scale), weight_VD.dtype

    def forward(self, ids_BT: Tensor) -> Tensor:
        return widen(self.weight[ids_BT], None if self.scale is None else self.scale[ids_BT], self.dtype)


def adapt(stage: Stage, adapter: AdapterConfig) -> None:
    """Freeze the weights of a stage and put adapters beside the target layers; their first numbers depend on seed and name alone."""
    model, form = stage.model, adapter.base_format
    targets, layers = target_layers(model, adapter), stage.architecture.linear_layers(model)
    stage.requires_grad_(False)
    for label, block in stage.layers.items():
        for index, inner in enumerate(layers):
            linear, number = block.get_submodule(inner), int(label) * len(layers) + index
            assert isinstance(linear, nn.Linear), inner
            if inner in targets:
                name = block_name(int(label), f"{inner}.lora_A")
                # As large as the uniform numbers that peft begins with.
                initial_RI = draw_normal(stage.seed, name, (adapter.rank, linear.in_features)) * (3 * linear.in_features) ** -0.5
                adapted = AdaptedLinear(linear, adapter, number, initial_RI)
                stage.adapted.setdefault(int(label), []).append(adapted)
                block.set_submodule(inner, adapted)
            else:
                block.set_submodule(inner, FrozenLinear(linear, form))
    if stage.plan.first:
        stage.embedding = FrozenEmbedding(stage.embedding.weight, None if model.tied_head else form)
    head = getattr(stage, "head", None)
    if isinstance(head, nn.Linear):
        stage.head = FrozenLinear(head, form)
    trained = {name for name, parameter in stage.named_parameters() if parameter.requires_grad}
    stage.matrices, stage.frozen = trained, frozenset(name for name, _ in stage.named_parameters() if name not in trained)
