"""Optimizers of one stage: AdamW with a second moment shared along the subspace axis, plain AdamW, Muon; clipping and the rate schedule.

In coordinates any optimizer is legal. `shared` is the published one written for coordinates (method, section 3): with g = U^T G the
gradient of Z, v_j = EMA(sum_r g_rj^2 / D), so rate, eps and decay are the same numbers as in the projected form.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from thinwire.config.sections import TrainConfig
from thinwire.model.names import EMBEDDING, HEAD
from thinwire.model.stage import Stage
from thinwire.model.subspace.drift import carry_over

# Tensors of optimizer state that live in coordinates, by how a move of the basis carries them over.
EMA = "ema"
"""The running mean of the weights."""
LINEAR_STATE = ("exp_avg", "momentum_buffer", EMA)
SQUARED_STATE = ("exp_avg_sq",)
EARLY_MOMENTUM, MOMENTUM = 0.85, 0.95
"""Of Muon, where it is warmed up and behind that."""


class SharedAdamW(torch.optim.Optimizer):
    """AdamW whose second moment is one number per vector of coordinates."""

    def __init__(self, parameters: Iterable[dict], width: int, betas: tuple[float, float], eps: float) -> None:
        super().__init__(parameters, {"lr": 0.0, "weight_decay": 0.0, "axis": 0, "width": width, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict) -> None:
        beta1, beta2 = group["betas"]
        state = self.state[parameter]
        energy = gradient.square().sum(group["axis"], keepdim=True) / group["width"]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["shared_sq"] = torch.zeros_like(energy)
        state["step"] += 1
        step = int(state["step"])
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["shared_sq"].lerp_(energy, 1 - beta2)
        root = (state["shared_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - beta1**step))


class StateOffload(Protocol):
    """Where the memory of state may lie between updates."""

    def put(self, name: str, tensor: Tensor) -> None:
        """Take a tensor's memory away."""
        ...

    def get(self, name: str, tensor: Tensor) -> None:
        """Bring it back, if it is away."""
        ...


class StageOptimizer:
    """Update one stage's parameters; state is named by parameter, so it fits any cut."""

    offload: StateOffload | None = None
    """Where the state lies between updates if it is not in memory."""

    def __init__(self, stage: Stage, train: TrainConfig) -> None:
        self.axes, self.ema = stage.axes, train.ema
        self.named = stage.trained()
        self.optimizers = list(self._assign(stage, train))
        peaks = {id(parameter): peak_rate(name, parameter, train) for name, parameter in self.named.items()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                (parameter,) = group["params"]
                group["peak"] = train.muon_rate if isinstance(optimizer, torch.optim.Muon) else peaks[id(parameter)]

    def _assign(self, stage: Stage, train: TrainConfig) -> Iterable[torch.optim.Optimizer]:
        """Give every parameter to one optimizer."""
        betas = (train.beta1, train.beta2)
        shared, matrices, plain = [], [], []
        for name, parameter in self.named.items():
            decay = train.weight_decay if name in stage.matrices else 0.0
            group = {"params": [parameter], "weight_decay": decay}
            if train.optimizer == "shared" and name in self.axes:
                shared.append(group | {"axis": self.axes[name]})
            elif train.optimizer == "muon" and name in stage.matrices and name != HEAD:
                matrices.append(group)
            else:
                plain.append(group)
        if shared:
            yield SharedAdamW(shared, stage.model.width, betas, train.eps)
        if matrices:
            yield torch.optim.Muon(matrices, lr=train.muon_rate, adjust_lr_fn="match_rms_adamw")
        if plain:
            yield torch.optim.AdamW(plain, lr=train.rate, betas=betas, eps=train.eps, fused=True)

    def squared_norm(self) -> float:
        """Return the sum of squares of all gradients."""
        return squared_norm(p.grad for p in self.named.values() if p.grad is not None)

    def step(self, factor: float, scale: float, momentum: float = MOMENTUM) -> None:
        """Update with the rate at `factor` of its peak, gradients times `scale` and this momentum of Muon; then clear the gradients."""
        for parameter in self.named.values():
            if scale != 1.0 and parameter.grad is not None:
                parameter.grad.mul_(scale)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor
                if isinstance(optimizer, torch.optim.Muon):
                    group["momentum"] = momentum
            if self.offload is None:
                optimizer.step()
            else:
                self._step_each(optimizer)
            optimizer.zero_grad(set_to_none=True)

    def _step_each(self, optimizer: torch.optim.Optimizer) -> None:
        """Update one parameter after the other, the state of each in memory only then."""
        names, groups = {id(parameter): name for name, parameter in self.named.items()}, optimizer.param_groups
        try:
            for group in groups:
                (parameter,) = group["params"]
                self._state_of(parameter)
                optimizer.param_groups = [group]
                optimizer.step()
                optimizer.param_groups = groups
                self._put_away(names[id(parameter)])
        finally:
            optimizer.param_groups = groups

    @torch.no_grad()
    def average(self) -> None:
        """Move the running mean of the weights towards them, if one is kept; it begins with the weights after their first update."""
        for name, parameter in self.named.items() if self.ema else ():
            state = self._state_of(parameter)
            if EMA in state:
                state[EMA].lerp_(parameter, 1 - self.ema)
            elif state:  # optimizers take one that is empty for new
                state[EMA] = parameter.detach().clone()
            self._put_away(name)

    def put_away(self) -> None:
        """Let the state lie in slow memory, if it may."""
        for name in self.named:
            self._put_away(name)

    def _put_away(self, name: str) -> None:
        if self.offload is not None:
            for label, tensor in self._owner(self.named[name]).state[self.named[name]].items():
                self.offload.put(f"{name}/{label}", tensor)

    def state_forms(self) -> dict[str, dict[str, Tensor]]:
        """Return the state of each parameter as it is once that has been updated, by name and label, in tensors without memory."""
        names = {id(parameter): name for name, parameter in self.named.items()}
        forms = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                (parameter,) = group["params"]
                whole = torch.empty_like(parameter, device="meta", requires_grad=False)
                count = torch.empty((), device="meta")
                if isinstance(optimizer, SharedAdamW):
                    state = {"exp_avg": whole, "shared_sq": whole.sum(group["axis"], keepdim=True), "step": count}
                elif isinstance(optimizer, torch.optim.Muon):
                    state = {"momentum_buffer": whole}
                else:
                    state = {"exp_avg": whole, "exp_avg_sq": whole, "step": count}
                forms[names[id(parameter)]] = state | ({EMA: whole} if self.ema else {})
        return forms

    def state_sizes(self) -> list[list[int]]:
        """Return the bytes of each tensor of each parameter's state, as they are once all have been updated."""
        return [[tensor.nbytes for tensor in state.values()] for state in self.state_forms().values()]

    def carry_over(self, rotation_KK: Tensor) -> None:
        """Carry coordinates and their moments over to a moved basis."""
        for name, axis in self.axes.items():
            carry_over(self.named[name].data, rotation_KK, axis)
            for label, tensor in self._state_of(self.named[name]).items():
                if label in LINEAR_STATE:
                    carry_over(tensor, rotation_KK, axis)
                elif label in SQUARED_STATE:
                    carry_over(tensor, rotation_KK.square(), axis)
            self._put_away(name)

    def _owner(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        return next(o for o in self.optimizers if any(parameter is p for g in o.param_groups for p in g["params"]))

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the state of a parameter, in memory."""
        state = self._owner(parameter).state[parameter]
        if self.offload is not None:
            name = next(name for name, other in self.named.items() if other is parameter)
            for label, tensor in state.items():
                self.offload.get(f"{name}/{label}", tensor)
        return state

    def state_tensors(self) -> dict[str, Tensor]:
        """Return all state as {parameter name/label: tensor}."""
        return {f"{name}/{label}": tensor for name, parameter in self.named.items() for label, tensor in self._state_of(parameter).items()}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Put state back; memory is torch's own, so that the bits of later steps do not depend on a file's alignment."""
        for key, tensor in tensors.items():
            name, _, label = key.rpartition("/")
            parameter = self.named[name]
            # Fused AdamW counts its steps on the device; `shared` counts them in Python, on the host.
            on_host = label == "step" and isinstance(self._owner(parameter), SharedAdamW)
            self._state_of(parameter)[label] = tensor.to("cpu" if on_host else parameter.device, copy=True)


def squared_norm(tensors: Iterable[Tensor]) -> float:
    """Return the sum of squares of all tensors, with one copy from their device."""
    norms = [torch.linalg.vector_norm(tensor) for tensor in tensors]
    return sum(norm**2 for norm in torch.stack(norms).tolist()) if norms else 0.0


def clip_scale(norm: float, clip: float) -> float:
    """Return the factor that brings a gradient of this norm down to `clip`; 0 turns clipping off."""
    if not math.isfinite(norm):
        raise ValueError(f"the gradient norm is {norm}: this update was not applied; lower train.rate or raise train.warmup")
    return clip / norm if clip > 0 and norm > clip else 1.0


def rate_factor(step: int, train: TrainConfig) -> float:
    """Return the share of the peak rate at a step: linear warm-up, then constant with a linear end, or half a cosine."""
    warm = min(1.0, (step + 1) / train.warmup) if train.warmup else 1.0
    if train.schedule == "cosine":
        done = max(0, step - train.warmup) / max(1, train.steps - train.warmup)
        left = (1 + math.cos(math.pi * min(1.0, done))) / 2
    else:
        decay_steps = math.ceil(train.steps * train.decay)
        left = min(1.0, (train.steps - step) / decay_steps) if decay_steps else 1.0
    return warm * (train.floor + (1 - train.floor) * left)


def muon_momentum(step: int, train: TrainConfig) -> float:
    """Return the momentum of Muon at a step."""
    share = min(1.0, step / train.muon_warmup) if train.muon_warmup else 1.0
    return MOMENTUM if share == 1.0 else EARLY_MOMENTUM + share * (MOMENTUM - EARLY_MOMENTUM)


def peak_rate(name: str, parameter: Tensor, train: TrainConfig) -> float:
    """Return the peak rate of a parameter by its group: embedding, head, norms and biases, and the rest."""
    own = {EMBEDDING: train.embedding_rate, HEAD: train.head_rate}.get(name, train.vector_rate if parameter.dim() < 2 else None)
    return train.rate if own is None else own
