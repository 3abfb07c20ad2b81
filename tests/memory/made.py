"""Profiles made up for tests of the simulator and the planner."""

from __future__ import annotations

import random

from thinwire.memory.blocks import Bandwidth, BlockCost, Profile

UNIT = 1000
"""Bytes of a block in the equal profile."""


def equal(bandwidth: float, blocks: int = 10, duplex: bool = True, microbatches: int = 1) -> Profile:
    """Make equal blocks of forward 1, backward 2 and one unit of bytes; the bandwidth is in blocks per time unit."""
    rate = bandwidth * UNIT
    made = tuple(BlockCost(str(index), 1.0, 2.0, UNIT, 0) for index in range(blocks))
    return Profile(made, Bandwidth(rate, rate, duplex), 0, 0, microbatches)


def arbitrary(seed: int, most: int = 7) -> Profile:
    """Make a profile of a few blocks that have nothing in common."""
    draw = random.Random(seed)
    blocks = tuple(
        BlockCost(str(index), draw.uniform(0.1, 2), draw.uniform(0.1, 4), draw.randrange(1, 3000), draw.randrange(0, 300))
        for index in range(draw.randrange(1, most + 1))
    )
    bandwidth = Bandwidth(draw.uniform(100, 3000), draw.uniform(100, 3000), draw.random() < 0.5)
    return Profile(blocks, bandwidth, draw.randrange(5000), draw.randrange(200), draw.randrange(1, 5), kinds={"parameters": 1})
