"""What a stage holds between two steps: in the optimizer's update, which works on one parameter at a time, and in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from thinwire.config.sections import TrainConfig
from thinwire.memory.live import Live
from thinwire.memory.optimizer_offload import worth_moving
from thinwire.memory.tier import CHUNK
from thinwire.model.stage import Stage
from thinwire.optim.optimizers import StageOptimizer


def between_steps(stage: Stage, train: TrainConfig, kinds: Mapping[str, int]) -> tuple[int, int]:
    """Return the most that is there with optimizer state in memory, and with it in slow memory; `kinds` are what is always there."""
    rest = sum(kinds.values()) - kinds["working memory"]
    scratch, states = scratch_bytes(stage, train), StageOptimizer(stage, train).state_sizes()
    one_by_one = max((mine + sum(worth_moving([sizes])) for mine, sizes in zip(scratch, states, strict=True)), default=0)
    saving = rest - kinds["gradients"]  # a checkpoint wants all state at once, when the gradients are gone
    return rest + max(scratch, default=0), max(saving, rest - sum(worth_moving(states)) + one_by_one + CHUNK)


def scratch_bytes(stage: Stage, train: TrainConfig) -> list[int]:
    """Return for each parameter the temporary tensors of its update, found by updating one like it; in the order of `state_sizes`."""
    found: list[int] = []
    known: dict[tuple[object, ...], int] = {}
    for optimizer in StageOptimizer(stage, train).optimizers:
        for group in optimizer.param_groups:
            (parameter,) = group["params"]
            form = type(optimizer), parameter.shape, group.get("axis")
            if form not in known:
                known[form] = scratch_of(optimizer, group, parameter)
            found.append(known[form])
    return found


def scratch_of(optimizer: torch.optim.Optimizer, group: dict, parameter: nn.Parameter) -> int:
    """Update a parameter of the same shape twice: the first time makes its state, the second shows what else it takes."""
    twin = nn.Parameter(torch.zeros_like(parameter))
    twin.grad = twin.detach()  # zeros that stay zeros: no room for a gradient is needed
    groups, optimizer.param_groups = optimizer.param_groups, [group | {"params": [twin]}]
    try:
        optimizer.step()
        with Live([twin, *optimizer.state[twin].values()]) as live:
            optimizer.step()
    finally:
        optimizer.param_groups = groups
        optimizer.state.clear()
    return live.peak
