"""Show a plan: in the terminal what each block does, where the memory goes and what every strategy would cost; its time line in letters
there, and as a picture of lanes with the extra `plot`.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from thinwire.memory.blocks import CHOICES, Plan, Profile, base_bytes
from thinwire.memory.plan import minimum, strategy_minimum
from thinwire.memory.simulate import Timeline, simulate
from thinwire.util.files import write_atomic
from thinwire.util.sizes import UNITS, write_size

STYLES = {"keep": "green", "recompute": "yellow", "offload": "blue"}
LETTERS = {"forward": ("F", "green"), "backward": ("B", "cyan"), "recompute": ("R", "yellow"), "out": ("o", "blue"), "in": ("i", "magenta")}
LEVELS = " ▁▂▃▄▅▆▇█"
WIDEST = 120
LABEL = 9
"""Columns of a time line, and of the words before it."""


def show_plan(profile: Profile, plans: Mapping[str, Plan | None], budget: int, console: Console) -> None:
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


def milliseconds_text(seconds: float) -> str:
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
        rates = profile.bandwidth.out_bytes_per_second, profile.bandwidth.in_bytes_per_second
        copies = [milliseconds_text(block.all_bytes / rate) if choice == "offload" else "" for rate in rates]
        times = milliseconds_text(block.forward_seconds), milliseconds_text(block.backward_seconds)
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


COLOURS = {"forward": "#7fc97f", "backward": "#6baed6", "recompute": "#fdae6b", "out": "#bcbddc", "in": "#9e9ac8"}
LANES = {"forward": 2, "backward": 2, "recompute": 2, "out": 1, "in": 0}
NAMES = ("copy in", "copy out", "compute")
ENDINGS: dict[str, dict[str, Any]] = {".png": {"dpi": 110, "metadata": {"Software": None}}, ".svg": {"metadata": {"Date": None}}}
NARROWEST = 0.009
"""A piece below this share of the width has no number in it."""


def check_picture(path: Path) -> Path:
    """Refuse a file that no picture can be written to."""
    if path.suffix not in ENDINGS:
        raise ValueError(f"the picture {path} ends in {path.suffix!r}; give it a name that ends in {' or '.join(ENDINGS)}")
    return path


def draw_timeline(profile: Profile, plan: Plan, line: Timeline, budget: int, path: Path) -> None:
    """Draw a time line and put the file in place."""
    import matplotlib  # the extra `plot`
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "thinwire", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, 4.8), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        draw_lanes(above, line)
        above.set_title(title(plan), loc="left", fontsize=10)
        draw_memory(below, line, base_bytes(profile, plan.in_flight), budget)
        below.set(xlabel="seconds; microbatches by turns darker and lighter", xlim=(0, line.seconds))
        buffer = io.BytesIO()
        figure.savefig(buffer, format=path.suffix[1:], **ENDINGS[path.suffix])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, buffer.getvalue())


def title(plan: Plan) -> str:
    """Say what the picture shows."""
    letters = "".join(choice[0] for choice in plan.choices)
    times = f"{plan.seconds / plan.ideal_seconds:.2f}x the ideal time"
    return f"Blocks {letters} (k keep, r recompute, o offload), {plan.in_flight} in flight: {times}"


def draw_lanes(axes: Any, line: Timeline) -> None:
    """Draw every piece of work as a bar with the number of its block; microbatches by turns lighter and darker."""
    drawn: dict[str, Any] = {}
    for event in line.events:
        length = event.end - event.start
        alpha = 1.0 if event.microbatch % 2 == 0 else 0.6
        look = {"color": COLOURS[event.kind], "alpha": alpha, "edgecolor": "white", "linewidth": 0.5}
        bars = axes.barh(LANES[event.kind], length, left=event.start, height=0.8, **look)
        drawn.setdefault(event.kind, bars)
        if length > NARROWEST * line.seconds:
            axes.text(event.start + length / 2, LANES[event.kind], str(event.block), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(3), NAMES)
    axes.tick_params(axis="y", length=0)
    names = [kind for kind in COLOURS if kind in drawn]
    axes.legend([drawn[kind] for kind in names], names, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def draw_memory(axes: Any, line: Timeline, base: int, budget: int) -> None:
    """Draw the memory in use over time, what is always there, and the budget."""
    unit = write_size(budget).split()[1]
    moments = [0.0, *(moment for moment, _ in line.memory), line.seconds]
    sizes = [base, *(size for _, size in line.memory), line.memory[-1][1]]
    used = [size / UNITS[unit] for size in sizes]
    axes.fill_between(moments, used, base / UNITS[unit], step="post", color="#d9d9d9", label="activations")
    axes.fill_between(moments, base / UNITS[unit], 0, color="#a6a6a6", label="always there")
    axes.axhline(budget / UNITS[unit], color="firebrick", linestyle="--", linewidth=1.2, label=f"budget {write_size(budget)}")
    axes.axhline(line.peak_bytes / UNITS[unit], color="black", linestyle=":", linewidth=1, label=f"peak {write_size(line.peak_bytes)}")
    axes.set(ylabel=f"memory, {unit}", ylim=(0, 1.12 * max(budget, line.peak_bytes) / UNITS[unit]))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
