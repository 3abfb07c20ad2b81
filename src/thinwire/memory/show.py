"""A plan for the terminal: what each block does, where the memory goes, what every strategy would cost, and a time line in letters."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from thinwire.memory.blocks import CHOICES, Plan, Profile
from thinwire.memory.plan import minimum, strategy_minimum
from thinwire.memory.simulate import Timeline, simulate
from thinwire.memory.space import base_bytes
from thinwire.util.sizes import write_size

STYLES = {"keep": "green", "recompute": "yellow", "offload": "blue"}
LETTERS = {"forward": ("F", "green"), "backward": ("B", "cyan"), "recompute": ("R", "yellow"), "out": ("o", "blue"), "in": ("i", "magenta")}
LEVELS = " ▁▂▃▄▅▆▇█"
WIDEST = 120
LABEL = 9
"""Columns of a time line, and of the words before it."""


def show(profile: Profile, plans: Mapping[str, Plan | None], budget: int, console: Console) -> None:
    """Print the chosen plan, `plans["hybrid"]`, and what it was chosen from."""
    plan = plans["hybrid"]
    assert plan is not None
    planned = profile.under(plan)
    console.print(block_table(planned, plan))
    console.print(kind_table(planned, plan, budget))
    console.print(strategy_table(profile, plans))
    line = short_line(planned, plan, budget)
    console.print(time_line(line, budget, min(console.width, WIDEST) - LABEL))
    console.print(
        f"{sentence(plan, budget)}. The smallest budget is {write_size(minimum(profile), up=True)}.", highlight=False, markup=False
    )


def short_line(profile: Profile, plan: Plan, budget: int) -> Timeline:
    """Simulate the beginning of a step: as many microbatches as show how it goes on."""
    line = simulate(profile, plan.choices, plan.in_flight, budget, min(profile.microbatches, plan.in_flight + 1))
    assert line is not None, "a plan that was made gets through"
    return line


def sentence(plan: Plan, budget: int) -> str:
    """Say in one line what a plan does and costs."""
    words = {"keep": "kept", "recompute": "recomputed", "offload": "offloaded"}
    counts = [f"{plan.choices.count(choice)} {words[choice]}" for choice in CHOICES if choice in plan.choices]
    return (
        f"{len(plan.choices)} blocks: {', '.join(counts)}; {plan.in_flight} microbatch{'es' * (plan.in_flight > 1)} in flight; "
        f"predicted peak {write_size(plan.most_bytes)} of {write_size(budget)}, predicted slow-down {slow_down(plan)}"
    )


def slow_down(plan: Plan) -> str:
    """Write how much longer a step takes than without a limit."""
    return f"{plan.seconds / plan.ideal_seconds:.2f}x"


def milliseconds(seconds: float) -> str:
    """Write a time of a block."""
    return f"{1000 * seconds:,.1f}"


def block_table(profile: Profile, plan: Plan) -> Table:
    """List the blocks and what they do."""
    table = Table(title="Blocks, per microbatch")
    table.add_column("block")
    table.add_column("choice")
    for name in ("forward ms", "backward ms", "saved", "input", "out ms", "in ms"):
        table.add_column(name, justify="right")
    for block, choice in zip(profile.blocks, plan.choices, strict=True):
        rates = profile.tier.out_bytes_per_second, profile.tier.in_bytes_per_second
        copies = [milliseconds(block.all_bytes / rate) if choice == "offload" else "" for rate in rates]
        times = milliseconds(block.forward_seconds), milliseconds(block.backward_seconds)
        sizes = write_size(block.saved_bytes), write_size(block.input_bytes)
        table.add_row(block.name, Text(choice, STYLES[choice]), *times, *sizes, *copies)
    return table


def kinds(profile: Profile, plan: Plan) -> dict[str, int]:
    """Return the predicted peak by kind."""
    rest = profile.fixed_bytes - sum(profile.kinds.values())
    parts = dict(profile.kinds) | ({"other": rest} if rest else {})
    parts["wire buffers"] = parts.get("wire buffers", 0) + profile.payload_bytes * plan.in_flight
    return parts | {"activations": plan.peak_bytes - base_bytes(profile, plan.in_flight)}


def kind_table(profile: Profile, plan: Plan, budget: int) -> Table:
    """List where the memory goes at the peak."""
    table = Table(title="Memory at the predicted peak of forward and backward")
    table.add_column("kind")
    table.add_column("bytes", justify="right")
    table.add_column("share", justify="right")
    for kind, size in kinds(profile, plan).items():
        table.add_row(kind, write_size(size), f"{100 * size / plan.peak_bytes:.0f} %")
    table.add_section()
    table.add_row("peak", write_size(plan.peak_bytes), "100 %", style="bold")
    table.add_row("between steps", write_size(plan.between_bytes), f"{100 * plan.between_bytes / plan.peak_bytes:.0f} %")
    table.add_row("budget", write_size(budget), f"{100 * budget / plan.peak_bytes:.0f} %")
    return table


def strategy_table(profile: Profile, plans: Mapping[str, Plan | None]) -> Table:
    """List all strategies side by side."""
    table = Table(title="Strategies")
    table.add_column("strategy")
    for name in ("slow-down", "s per step", "peak", "in flight"):
        table.add_column(name, justify="right")
    table.add_column("blocks")
    for name, plan in plans.items():
        if plan is None:
            table.add_row(name, "does not fit", "", f"at least {write_size(strategy_minimum(profile, name), up=True)}", style="dim")
            continue
        letters = Text.assemble(*((choice[0], STYLES[choice]) for choice in plan.choices))
        cells = slow_down(plan), f"{plan.seconds:,.3f}", write_size(plan.most_bytes), str(plan.in_flight)
        table.add_row(name, *cells, letters, style="bold" if name == "hybrid" else "")
    table.caption = "k keep, r recompute, o offload; the hybrid is what is run"
    return table


def time_line(line: Timeline, budget: int, width: int) -> Text:
    """Draw computation, copies and memory over time, a letter per moment."""
    width = max(20, width)
    count = 1 + max(event.microbatch for event in line.events)
    text = Text(f"\nTime line of {count} microbatch{'es' * (count > 1)}, {line.seconds:,.3f} s\n", "italic")
    for label, lane in (("compute", ("forward", "backward", "recompute")), ("copy out", ("out",)), ("copy in", ("in",))):
        text.append(f"{label:<{LABEL}}", "default")
        cells: list[tuple[str, str]] = [("·", "dim")] * width
        for event in line.events:
            if event.kind in lane:
                start, end = (int(width * moment / line.seconds) for moment in (event.start, event.end))
                # A short piece has its one letter all the same.
                cells[start : max(end, start + 1)] = [LETTERS[event.kind]] * (max(end, start + 1) - start)
        text.append(Text.assemble(*cells[:width], "\n"))
    text.append(f"{'memory':<{LABEL}}{memory_bar(line, budget, width)}\n", "default")
    text.append("F forward, B backward, R recompute, o out, i in, · waiting; memory as a share of the budget\n", "dim")
    return text


def memory_bar(line: Timeline, budget: int, width: int) -> str:
    """Draw the most memory in use at each moment as a bar."""
    most, used, place = [0] * width, 0, 0
    for moment, size in line.memory:
        here = min(width - 1, int(width * moment / line.seconds))
        for cell in range(place, here + 1):
            most[cell] = max(most[cell], used)
        most[here] = max(most[here], size)
        used, place = size, here
    return "".join(LEVELS[min(len(LEVELS) - 1, round((len(LEVELS) - 1) * size / budget))] for size in most)
