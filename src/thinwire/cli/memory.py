"""Say how a stage would fit into a memory budget, without training.

    thinwire memory --config NAME --memory.budget 2GB [--stage N] [--picture FILE] [any option of `thinwire train`]

Measures the stage on this machine, plans, and prints the plan, its cost and a time line.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.config.command_line import DEFAULT_CONFIG, parse_config, scan
from thinwire.config.profiles import find_profile
from thinwire.config.sections import RunConfig
from thinwire.config.toml import load_config
from thinwire.memory.blocks import Plan, Profile, base_bytes
from thinwire.memory.simulate import Timeline
from thinwire.pipeline.order import fixed_depth
from thinwire.pipeline.schedule import check_bounded, depths
from thinwire.run.check import check, resolve
from thinwire.util.sizes import read_size

if TYPE_CHECKING:
    from rich.console import Console

NOT_HERE = {"run": "nothing is written", "resume": "--config RUN/config.toml gives the settings of a run", "track": "nothing is trained"}
"""Options of `thinwire train` that mean nothing here, and why."""


@dataclass(frozen=True, kw_only=True)
class MemoryCommand:
    """What `thinwire memory` was asked to do."""

    config: RunConfig
    stage: int
    picture: Path | None


def parse_memory(argv: list[str]) -> MemoryCommand:
    """Read the options of `thinwire memory`: --stage, --picture, and the settings of `thinwire train`."""
    own = argparse.ArgumentParser(
        prog="thinwire memory",
        allow_abbrev=False,
        description="Say how a stage would fit into --memory.budget, without training. Any setting of `thinwire train` can follow.",
    )
    own.add_argument("--config", metavar="NAME", help=f"packaged config, or a file that ends in .toml (default: {DEFAULT_CONFIG})")
    own.add_argument("--memory.budget", metavar="SIZE", help="most memory of the stage, such as 2GB or 1.5GiB (default: no limit)")
    own.add_argument("--stage", type=int, default=0, help="which stage, from 0 (default: 0)")
    own.add_argument("--picture", type=Path, metavar="FILE", help="draw the time line into a .png or .svg file")
    mine, rest = own.parse_known_args(argv)
    for option, why in NOT_HERE.items():
        if option in scan(rest):
            raise ValueError(f"--{option} is not for thinwire memory: {why}; leave it out")
    if budget := getattr(mine, "memory.budget"):
        rest += ["--memory.budget", budget]
    config = parse_config(rest, load_config(mine.config or DEFAULT_CONFIG))
    check(config)
    if not 0 <= mine.stage < config.pipeline.stages:
        raise ValueError(f"--stage is {mine.stage}, the stages are 0 to {config.pipeline.stages - 1}; choose one of them")
    if config.memory.budget is not None and config.pipeline.mode == "workers":
        check_bounded(config.pipeline.schedule)
    from thinwire.memory.show import check_picture  # not at the top: --help answers without rich's tables

    return MemoryCommand(config=resolve(config), stage=mine.stage, picture=mine.picture and check_picture(mine.picture))


def wanted_depth(config: RunConfig, stage: int, profile: Profile) -> int:
    """Return how many microbatches the pipeline would keep in flight on a stage if memory were no limit."""
    from thinwire.codecs.build import make_codec  # not at the top: it imports torch

    stages, microbatches = config.pipeline.stages, config.pipeline.microbatches
    if config.pipeline.mode == "inprocess":
        return 1
    if depth := fixed_depth(config.pipeline.schedule, stage, stages, microbatches):
        return depth
    line = find_profile(config.link.profile)
    tokens = config.replica_batch // microbatches * config.model.context
    bits = 8 * tokens * make_codec(config.codec, config.model).spec(1, config.model.context).usual_bytes_per_token("forward")
    sending = bits / (line.up_mbps * 1e6) if line.up_mbps else 0.0
    compute = sum(block.forward_seconds + block.backward_seconds for block in profile.blocks)
    return depths(stages, microbatches, line.delay_ms / 1000 + sending, max(compute, sending))[stage]


def main(argv: list[str]) -> None:
    """Run the `memory` verb."""
    command = parse_memory(argv)
    import torch  # not at the top: --help answers without it
    from rich.console import Console

    from thinwire.memory.measure import profile_stage
    from thinwire.util.device import choose_device

    config = command.config
    torch.set_num_threads(config.train.threads or torch.get_num_threads())
    report(command, profile_stage(config, command.stage, choose_device(config.device)), Console())


def report(command: MemoryCommand, profile: Profile, console: Console) -> None:
    """Plan for a profile, print what came out, and draw it if a picture is wanted."""
    from thinwire.memory.plan import compare_strategies, refusal
    from thinwire.memory.show import short_line, show_plan

    depth = wanted_depth(command.config, command.stage, profile)
    text = command.config.memory.budget
    budget = whole_bytes(profile, depth) if text is None else read_size(text)
    plans = compare_strategies(profile, budget, depth)
    if (plan := plans["hybrid"]) is None:
        raise ValueError(refusal(profile, budget))
    heading = f"Stage {command.stage} of {command.config.pipeline.stages}, {profile.microbatches} microbatches a step; "
    heading += "no budget: everything is kept" if text is None else f"budget {text}"
    bandwidth = profile.bandwidth
    heading += f"; slow memory takes {bandwidth.out_bytes_per_second / 1e6:,.0f} and gives {bandwidth.in_bytes_per_second / 1e6:,.0f} MB/s"
    console.print(heading, highlight=False, markup=False)
    if plan.optimizer_out:
        console.print(
            f"The optimizer state, {profile.optimizer_bytes / 1e6:,.1f} MB, lies in slow memory between updates.", highlight=False
        )
    show_plan(profile, plans, budget, console)
    if command.picture is not None:
        profile = profile.under(plan)
        said = draw_picture(profile, plan, short_line(profile, plan, budget), budget, command.picture)
        console.print(said, highlight=False, markup=False, soft_wrap=True)


def whole_bytes(profile: Profile, depth: int) -> int:
    """Return what a stage uses if everything is kept."""
    return max(profile.between(depth), base_bytes(profile, depth) + depth * sum(block.all_bytes for block in profile.blocks))


def draw_picture(profile: Profile, plan: Plan, line: Timeline, budget: int, path: Path) -> str:
    """Draw the time line if matplotlib is there; return what to say about it."""
    from thinwire.memory.show import draw_timeline

    try:
        draw_timeline(profile, plan, line, budget, path)
    except ModuleNotFoundError as error:
        install = "in the checkout: pip install -c constraints.txt -e '.[plot]'"
        return f"no picture: {error.name} is not installed; {install}, then give the same command again"
    return f"picture: {path}"
