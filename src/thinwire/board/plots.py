"""The board as pictures, PNG and SVG: loss by steps, loss by time on each link, loss by bytes. Drawing twice gives the same files."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.board.score import Board, Standing
from thinwire.util.files import write_atomic

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "thinwire",
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "figure.dpi": 100,
}
WIDTH, HEIGHT, LEGEND_LINE, LETTER = 9.0, 5.0, 0.21, 0.078
"""Inches; a long legend makes the figure taller, and labels of more than `SHORT` letters make it wider."""
SHORT = 34
DASHES = ("-", "--", "-.", ":")
FORMATS: dict[str, dict[str, Any]] = {"png": {"dpi": 110, "metadata": {"Software": None}}, "svg": {"metadata": {"Date": None}}}
PLACES = tuple((right, up) for up in (-3, 8, -14, 19, -25, 30, -36, 41, -47, 52, -58) for right in (8, -8))
"""Where a label may stand beside its point, in points, best first."""
NEAR = 20
"""A label farther up or down than this gets a line to its point."""


def draw_plots(board: Board, links: Sequence[str], folder: Path) -> list[Path]:
    """Draw all plots of a board into its folder and drop those it no longer has; return the PNGs."""
    import matplotlib  # the extra `plot`

    with matplotlib.rc_context(STYLE):
        figures = {"1-steps": by_steps(board)}
        if any(standing.above is not None for standing in board.standings):
            figures["2-bytes"] = by_bytes(board)
        for number, link in enumerate(links, 3):
            if any(standing.links[link].pace for standing in board.standings if standing.curve):
                figures[f"{number}-{link}"] = by_time(board, link)
        files = {f"{name}.{ending}": figure_bytes(figure, ending) for name, figure in figures.items() for ending in FORMATS}
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        write_atomic(folder / name, data)
    for path in [*folder.glob("*.png"), *folder.glob("*.svg")]:
        if path.name not in files:
            path.unlink()
    return [folder / f"{name}.png" for name in figures]


def figure_bytes(figure: Any, ending: str) -> bytes:
    """Return a figure as the bytes of a file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=ending, **FORMATS[ending])
    return buffer.getvalue()


def canvas(board: Board, title: str, across: str, up: str) -> tuple[Any, Any]:
    """Make an empty figure."""
    from matplotlib.figure import Figure  # not pyplot: that keeps every figure

    longest = max((len(standing.label) for standing in board.standings), default=0)
    size = WIDTH + LETTER * max(0, longest - SHORT), max(HEIGHT, 1 + LEGEND_LINE * len(board.standings))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=across, ylabel=up)
    return figure, axes


def styles(board: Board) -> Mapping[str, dict[str, Any]]:
    """Give every spec its own line, the same in all plots; the reference is black."""
    others = [standing.label for standing in board.standings if standing.label != board.subject.reference]
    found: dict[str, dict[str, Any]] = {
        label: {"color": f"C{number % 10}", "linestyle": DASHES[number // 10 % len(DASHES)], "linewidth": 1.5}
        for number, label in enumerate(others)
    }
    return found | {board.subject.reference: {"color": "black", "linewidth": 2.2, "zorder": 3}}


def curves(axes: Any, board: Board, standings: Sequence[Standing], across: Callable[[Standing, int], float]) -> None:
    """Draw learning curves over whatever `across` makes of a step, and the target."""
    looks = styles(board)
    for standing in standings:
        points = standing.curve.items()
        look = looks[standing.label]
        axes.plot([across(standing, step) for step, _ in points], [loss for _, loss in points], marker=".", label=standing.label, **look)
    if board.target is not None:
        axes.axhline(board.target, color="grey", linestyle="--", linewidth=1, label=f"target {board.target:.3f}")
    if standings or board.target is not None:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0, frameon=False, fontsize=9)


def by_steps(board: Board) -> Any:
    """Draw loss against steps."""
    figure, axes = canvas(board, "Validation loss by steps", "steps", "validation loss")
    curves(axes, board, [standing for standing in board.standings if standing.curve], lambda standing, step: step)
    return figure


def by_time(board: Board, link: str) -> Any:
    """Draw loss against time on a link."""
    figure, axes = canvas(board, f"Validation loss by time on {link}", "estimated seconds", "validation loss")

    def seconds(standing: Standing, step: int) -> float:
        pace = standing.links[link].pace
        assert pace is not None
        return pace.time(step)

    curves(axes, board, [each for each in board.standings if each.curve and each.links[link].pace], seconds)
    plain_log(axes)
    return figure


def by_bytes(board: Board) -> Any:
    """Draw the distance to the reference against the bytes that are judged, one labelled point per spec."""
    subject = board.subject
    figure, axes = canvas(board, "Loss against what crosses", subject.axis, f"validation loss above {subject.reference}, %")
    looks = styles(board)
    points = [each for each in board.standings if each.above is not None and each.judged]
    axes.axhline(0, color="grey", linewidth=0.8)
    for each in points:
        axes.plot(
            [(each.judged or 0.0) / subject.scale],
            [each.above],
            marker="o",
            linestyle="none",
            color=looks[each.label]["color"],
            zorder=3,
        )
    plain_log(axes)
    axes.margins(0.12, 0.15)
    places = [((each.judged or 0.0) / subject.scale, each.above or 0.0) for each in points]
    place_labels(figure, axes, [(each.label, *place, looks[each.label]["color"]) for each, place in zip(points, places, strict=True)])
    return figure


def plain_log(axes: Any) -> None:
    """Make the horizontal axis logarithmic, with plain numbers, enough of them on a short one too."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}" if value < 1e6 else f"{value:.0e}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def place_labels(figure: Any, axes: Any, points: Sequence[tuple[str, float, float, str]]) -> None:
    """Write each label where it covers no other label, no point and not the zero line, if there is such a place."""
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()  # the layout must be final: labels are placed in pixels
    figure.set_layout_engine("none")
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in (axes.transData.transform(point[1:3]) for point in points)]
    frame, ground = axes.get_window_extent(), axes.transData.transform((1.0, 0.0))[1]
    taken.append(Bbox.from_extents(frame.x0, ground - 1, frame.x1, ground + 1))
    pixels = figure.dpi / 72
    for label, x, y, colour in points:
        text = axes.annotate(label, (x, y), (0, 0), textcoords="offset points", fontsize=8, color=colour)
        own = text.get_window_extent()
        best: tuple[int, tuple[int, int], Any] | None = None
        for right, up in PLACES:
            box = own.translated((right * pixels) if right > 0 else (right * pixels - own.width), up * pixels)
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            cost = sum(box.overlaps(other) for other in taken) + 10 * (not inside)
            if best is None or cost < best[0]:
                best = (cost, (right, up), box)
        assert best is not None
        (right, up), box = best[1:]
        taken.append(box)
        text.remove()
        side, edge = ("left", 0.0) if right > 0 else ("right", 1.0)
        line = {"arrowstyle": "-", "linewidth": 0.6, "color": colour, "relpos": (edge, 0.5)} if abs(up) > NEAR else None
        axes.annotate(label, (x, y), (right, up), textcoords="offset points", fontsize=8, ha=side, color=colour, arrowprops=line)
