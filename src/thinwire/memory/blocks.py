"""What the planner knows of a stage and what it decides: the cost of each block, the profile, the plan, and their bytes. Free of torch.

Times are seconds and sizes are bytes of one microbatch, as measured by `measure.py`; `plan.py` makes plans of them and `execute.py`
follows those. A block is one layer of the stage, in forward order. The simulator and the offload thread both ask here for the space that
a plan needs, so that they give the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

Choice = Literal["keep", "recompute", "offload"]
Choices = tuple[Choice, ...]
CHOICES: Choices = get_args(Choice)


@dataclass(frozen=True)
class BlockCost:
    """A layer of a stage: what its forward and backward cost for one microbatch."""

    name: str
    forward_seconds: float
    backward_seconds: float
    saved_bytes: int
    """Activations that autograd keeps for this block's backward, besides its input."""
    input_bytes: int
    """The block's input, kept by recompute."""
    parameter_bytes: int = 0

    @property
    def all_bytes(self) -> int:
        """What the block holds when its forward has ended: kept by keep, moved out and in again by offload."""
        return self.saved_bytes + self.input_bytes

    def resting_bytes(self, choice: Choice) -> int:
        """What stays in memory between forward and backward, once a copy out has ended."""
        return self.all_bytes if choice == "keep" else self.input_bytes if choice == "recompute" else 0


@dataclass(frozen=True)
class Bandwidth:
    """How fast one thread copies to slow memory and back."""

    out_bytes_per_second: float
    in_bytes_per_second: float
    duplex: bool
    """Whether copies out and copies in run at once."""

    @property
    def usable(self) -> bool:
        """Whether anything can be moved there and back."""
        return min(self.out_bytes_per_second, self.in_bytes_per_second) > 0


@dataclass(frozen=True)
class Profile:
    """One stage as it was measured."""

    blocks: tuple[BlockCost, ...]
    bandwidth: Bandwidth
    fixed_bytes: int
    """Everything that is always there: parameters, gradients, optimizer state, buffers, basis and fixed table."""
    payload_bytes: int
    """Wire buffers of one microbatch in flight."""
    microbatches: int
    """Microbatches of a step."""
    optimizer_bytes: int = 0
    """What of `fixed_bytes` could be offloaded between steps."""
    between_bytes: int = 0
    """The most that is there between two steps, when activations and payloads are not: in the optimizer's update."""
    slim_between_bytes: int = 0
    """The same with optimizer state offloaded: in the update or in a checkpoint, which wants all of it."""
    kinds: Mapping[str, int] = field(default_factory=dict)
    """`fixed_bytes` by kind, such as parameters or gradients."""

    @property
    def slim(self) -> Profile:
        """The same stage with its optimizer state in slow memory between updates."""
        kinds = {kind: size - self.optimizer_bytes if kind == "optimizer" else size for kind, size in self.kinds.items()}
        fixed = self.fixed_bytes - self.optimizer_bytes
        return replace(self, fixed_bytes=fixed, optimizer_bytes=0, between_bytes=self.slim_between_bytes, kinds=kinds)

    def between(self, in_flight: int) -> int:
        """What is there between two steps at most, with what neighbours may have sent for the next one."""
        return self.between_bytes + self.payload_bytes * in_flight

    def under(self, plan: Plan) -> Profile:
        """Return the stage as a plan sees it."""
        return self.slim if plan.optimizer_out else self


@dataclass(frozen=True)
class Plan:
    """What to do with the saved activations of each block, and what that costs."""

    choices: Choices
    in_flight: int
    """Microbatches whose activations are alive at once."""
    peak_bytes: int
    """Everything the stage holds at the fullest moment of forward and backward."""
    seconds: float
    """Predicted time of a step's computation with this plan."""
    ideal_seconds: float
    """The same if memory were no limit."""
    optimizer_out: bool = False
    """Whether optimizer state lies in slow memory between updates."""
    between_bytes: int = 0
    """Everything the stage holds at the fullest moment between two steps."""

    @property
    def most_bytes(self) -> int:
        """Everything the stage ever holds at once."""
        return max(self.peak_bytes, self.between_bytes)


def alike(choice: Choice, count: int) -> Choices:
    """Return the same choice for so many blocks."""
    return (choice,) * count


def floor_bytes(blocks: Sequence[BlockCost], choices: Sequence[Choice], in_flight: int = 1) -> int:
    """Return the fewest bytes of activations with which a plan gets through a step: everything offloaded has left."""
    resting = [block.resting_bytes(choice) for block, choice in zip(blocks, choices, strict=True)]
    below = peak = 0
    for block, rests in zip(blocks, resting, strict=True):
        # In forward as in backward the block at work has all its bytes, those before it in the stage rest.
        peak = max(peak, below + block.all_bytes)
        below += rests
    return peak + (in_flight - 1) * below


def base_bytes(profile: Profile, in_flight: int) -> int:
    """Return what is there besides activations."""
    return profile.fixed_bytes + profile.payload_bytes * in_flight


def reserve(blocks: Sequence[BlockCost], choices: Sequence[Choice], working: int, started: bool, wanted: int) -> int:
    """Return what a prefetch of block `wanted` must leave free, so that every recompute before it finds its slot.

    Backward is at block `working`; `started` says whether that block has its space already. Without this rule prefetches could take all
    the space, and a recompute would wait for ever.
    """
    needed = released = 0
    for index in range(working, wanted, -1):
        block, choice = blocks[index], choices[index]
        waiting = choice == "recompute" and not (started and index == working)
        if waiting:
            needed = max(needed, block.saved_bytes - released)
        released += block.input_bytes if waiting else block.all_bytes
    return needed
