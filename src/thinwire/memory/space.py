"""How much memory a plan needs at least, and what must stay free beside a prefetch. Bytes only: no clock, no torch.

The simulator and the executor ask here, so that both give the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.memory.blocks import Block, Choice, Profile


def floor_bytes(blocks: Sequence[Block], choices: Sequence[Choice], in_flight: int = 1) -> int:
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


def reserve(blocks: Sequence[Block], choices: Sequence[Choice], working: int, started: bool, wanted: int) -> int:
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
