"""The time line of a plan as a picture: computation and copies in lanes, memory below them. Needs the extra `plot`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from thinwire.memory.blocks import Plan, Profile
from thinwire.memory.simulate import Timeline
from thinwire.memory.space import base_bytes
from thinwire.util.files import write_atomic
from thinwire.util.sizes import UNITS, write_size

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


def draw(profile: Profile, plan: Plan, line: Timeline, budget: int, path: Path) -> None:
    """Draw a time line and put the file in place."""
    import matplotlib  # the extra `plot`
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "thinwire", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, 4.8), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        lanes(above, line)
        above.set_title(title(plan), loc="left", fontsize=10)
        memory(below, line, base_bytes(profile, plan.in_flight), budget)
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


def lanes(axes: Any, line: Timeline) -> None:
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


def memory(axes: Any, line: Timeline, base: int, budget: int) -> None:
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
