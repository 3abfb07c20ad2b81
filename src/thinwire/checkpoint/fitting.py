"""Compare what a checkpoint holds with what a stage and its optimizer are: names, shapes, number formats, nothing missing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from thinwire.model.names import boundary_of
from thinwire.model.stage import Stage
from thinwire.optim.optimizers import StageOptimizer


class Formed(Protocol):
    """A tensor, in memory or in a file."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype | None: ...


def shape_and_format(tensor: Formed | None) -> str:
    """Write shape and number format, such as (97, 6) float32."""
    return "missing" if tensor is None else f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def refuse_misfit(folder: Path, stage: Stage, weights: Mapping[str, Tensor]) -> None:
    """Refuse weights that differ from the stage's in name, shape or number format."""
    expected = stage.state_dict()
    for name in sorted(expected.keys() | weights.keys()):
        here, there = shape_and_format(expected.get(name)), shape_and_format(weights.get(name))
        if here != there:
            raise ValueError(f"{folder} does not fit stage {stage.plan.index} of this model: {name} is {there} there, {here} here")


def refuse_state(
    folder: Path, stage: Stage, optimizer: StageOptimizer, state: Mapping[str, Tensor], stateless: Collection[str] | None
) -> None:
    """Refuse optimizer state that is not whole, or not of this optimizer: a resumed run would learn something else in silence.

    `stateless` names the parameters that no step had updated; None: an older manifest, which does not tell. Then only what a codec has
    at a boundary can be such a parameter, during its warm-up.
    """
    if not state:
        raise ValueError(
            f"{folder} holds weights without optimizer state, as `thinwire export` writes them; it can be evaluated, not resumed"
        )
    expected: dict[str, Tensor] = {}
    for name, tensors in optimizer.state_forms().items():
        untouched = not any(f"{name}/{label}" in state for label in tensors)
        if not (untouched and (boundary_of(name) is not None if stateless is None else name in stateless)):
            expected |= {f"{name}/{label}": tensor for label, tensor in tensors.items()}
    for name in sorted(expected.keys() | state.keys()):
        here, there = shape_and_format(expected.get(name)), shape_and_format(state.get(name))
        if here != there:
            raise ValueError(
                f"the optimizer state in {folder} does not fit stage {stage.plan.index}: {name} is {there} there, {here} here; it is "
                "damaged or of another version: delete the folder and resume from the checkpoint before it"
            )
