"""The published projected form, D wide, against which the coordinate form is checked (method, section 3).

Full matrices Wo, W2 and embedding = fixed + low; gradients of Wo, W2 and low are projected, the second moment is constant along D, and
after each step the matrices are projected back: W <- U U^T W.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from helpers import make_pipeline
from thinwire.config.sections import ModelConfig, TrainConfig
from thinwire.optim.optimizers import clip_scale, rate_factor
from thinwire.pipeline.inprocess import Pipeline


def wide_form(pipeline: Pipeline, dtype: str = "fp64", **changes) -> Pipeline:
    """Return the plain D-wide Llama with the same function: Wo = U Zo, W2 = U Z2, embedding = fixed + E U^T."""
    model: ModelConfig = pipeline.stages[0].model
    wide = make_pipeline("dense", replace(model, **changes), stages=1, dtype=dtype)
    state = wide.stages[0].state_dict()
    stream = pipeline.stages[0].stream
    for stage in pipeline.stages:
        for name, tensor in stage.named_parameters():
            if name == "embedding.weight":
                tensor = fixed_table(pipeline) + tensor @ stream.basis_DK.T
            elif name in stage.axes:
                tensor = stream.basis_DK @ tensor
            state[name] = tensor.detach().clone()
    wide.stages[0].load_state_dict(state)
    return wide


def fixed_table(pipeline: Pipeline) -> Tensor:
    """Return fixed[t] for all tokens."""
    stream = pipeline.stages[0].stream
    return stream.fixed.compute(torch.arange(stream.fixed.vocabulary))


class ProjectedAdamW:
    """The published optimizer on the D-wide form, written out plainly."""

    def __init__(self, wide: Pipeline, coordinates: Pipeline, train: TrainConfig) -> None:
        self.train, self.steps = train, 0
        self.basis = coordinates.stages[0].stream.basis_DK
        self.parameters = dict(wide.stages[0].named_parameters())
        self.axes = {name: axis for stage in coordinates.stages for name, axis in stage.axes.items()}
        self.fixed = fixed_table(coordinates)
        self.first = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.parameters.items()}

    def project(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self.axes:
            return tensor
        along = self.basis @ self.basis.T
        return along @ tensor if self.axes[name] == 0 else tensor @ along

    @torch.no_grad()
    def step(self) -> None:
        train = self.train
        factor = rate_factor(self.steps, train) * train.rate
        self.steps += 1
        projected = {name: self.project(name, p.grad) for name, p in self.parameters.items()}
        scale = clip_scale(float(torch.stack([g.square().sum() for g in projected.values()]).sum().sqrt()), train.clip)
        for name, parameter in self.parameters.items():
            gradient = projected[name] * scale
            energy = gradient.square()
            if name in self.axes:
                energy = energy.mean(self.axes[name], keepdim=True).expand_as(gradient)
            self.first[name].mul_(train.beta1).add_(gradient, alpha=1 - train.beta1)
            self.second[name].mul_(train.beta2).add_(energy, alpha=1 - train.beta2)
            root = (self.second[name] / (1 - train.beta2**self.steps)).sqrt() + train.eps
            frozen = self.fixed if name == "embedding.weight" else 0.0
            decay = train.weight_decay if parameter.dim() == 2 and name != "embedding.weight" else 0.0
            value = (parameter - frozen) * (1 - factor * decay) - factor / (1 - train.beta1**self.steps) * self.first[name] / root
            parameter.copy_(self.project(name, value) + frozen)
            parameter.grad = None
