"""Curves through the rows of bench/scaling.py, with intervals, as data for a planner and as a page for people.

    gap = a (C / 32)^b (D / 256)^e (N / 1 M)^t          C times fewer bytes, width D, N tokens

by weighted least squares, each method for itself; an exponent whose variable has one value in the rows is left out. Intervals are 5 % to
95 % of fits to rows drawn with replacement. No wire is worse than none: a prediction is at most the gap of the control.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from scaling_jobs import CORPORA, Job
from thinwire.util.files import write_atomic

UNITS = {"compression": 32.0, "width": 256.0, "tokens": 1e6}
"""What each variable is counted in, and its order."""
NOISE = 0.003
"""Standard deviation of a gap where there are too few seeds to tell (docs/log.md)."""
LOOSE = 0.15
"""Share of a gap by which a power law may be off: keeps large gaps from deciding alone."""
DRAWS = 500
TITLES = {"subspace": "subspace", "anchored": "anchored", "entropy": "anchored, entropy-coded", "dense4": "dense in 4 bits"}
Rows = dict[Job, dict[str, Any]]


def points_of(rows: Rows) -> list[dict[str, Any]]:
    """Return a point for each method, width, compression and number of tokens: the mean gap over its seeds."""
    gaps = defaultdict(list)
    for job, row in rows.items():
        if job.method != "dense" and job.dense in rows:
            key = job.method, job.corpus, job.width, job.compression, job.steps
            gaps[key].append((row["val_loss"] / rows[job.dense]["val_loss"] - 1, row))
    points = []
    for (method, corpus, width, compression, _), found in sorted(gaps.items()):
        values = [gap for gap, _ in found]
        point = {
            "method": method,
            "corpus": corpus,
            "width": width,
            "asked": compression,
            "compression": found[0][1]["compression"],
            "tokens": found[0][1]["tokens"],
            "parameters": found[0][1]["trainable_parameters"],
        }
        points.append(point | {"gap": float(np.mean(values)), "seeds": len(values), "spread": spread_of(values)})
    return points


def spread_of(values: list[float]) -> float | None:
    """Return the standard deviation, where there is one."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def fit_all(rows: Rows) -> dict[str, Any]:
    """Fit every method on the first corpus; return all that a planner may quote."""
    points = points_of(rows)
    spreads = [point["spread"] for point in points if point["spread"] is not None]
    noise = float(np.sqrt(np.mean(np.square(spreads)))) if len(spreads) >= 3 else NOISE
    first = [point for point in points if point["corpus"] == CORPORA[0]]
    methods = {method: fit_method([point for point in first if point["method"] == method], noise) for method in TITLES}
    return {
        "formula": "gap = a (C / 32)^b (D / 256)^e (N / 1e6)^t, at most the control's; gap: validation loss over dense's, less 1",
        "setting": "8 layers in 4 stages, vocabulary 1,024, 128 tokens per sequence, batch 16, rate 0.003 at every width, equal trainable "
        "parameters, text of the Python standard library; compression of payloads, ids not counted",
        "noise": noise,
        "noise_measured": len(spreads) >= 3,
        "methods": {method: fitted for method, fitted in methods.items() if fitted},
        "control": [point for point in points if point["method"] == "nothing"],
        "points": [point for point in points if point["method"] != "nothing"],
    }


def fit_method(points: list[dict[str, Any]], noise: float) -> dict[str, Any] | None:
    """Fit one method; None: there are no rows."""
    if not points:
        return None
    columns = {name: np.log([point[name] / unit for point in points]) for name, unit in UNITS.items()}
    used = [name for name, column in columns.items() if np.ptp(column) > 0.3]
    matrix = np.column_stack([np.ones(len(points)), *(columns[name] for name in used)])
    gaps = np.array([point["gap"] for point in points])
    weights = 1 / np.sqrt(noise**2 / np.array([point["seeds"] for point in points]) + (LOOSE * gaps) ** 2)
    if len(points) < matrix.shape[1]:
        return {"rows": len(points), "notes": [f"{len(points)} rows are too few for a curve"]}
    found = solve(matrix, gaps, weights)
    low, high = intervals(matrix, gaps, weights)
    names = ["a", *({"compression": "b", "width": "e", "tokens": "t"}[name] for name in used)]
    values = [np.exp(found[0]), *found[1:]]
    return {
        "rows": len(points),
        "parameters": {name: {"value": float(values[n]), "low": low[n], "high": high[n]} for n, name in enumerate(names)},
        "range": {name: [float(min(p[name] for p in points)), float(max(p[name] for p in points))] for name in UNITS},
        "residual": float(np.sqrt(np.mean((np.exp(matrix @ found) - gaps) ** 2))),
        "notes": notes_of(points, used, matrix.shape[1]),
    }


def notes_of(points: list[dict[str, Any]], used: list[str], parameters: int) -> list[str]:
    """Say what the fit does not rest on."""
    single = [f"{name} ({points[0][name]:,.4g})" for name in UNITS if name not in used]
    notes = [f"one value of {', '.join(single)}: a holds there, and nothing is said of others"] if single else []
    if len(points) < 2 * parameters:
        notes.append(f"{len(points)} points for {parameters} parameters: hardly a fit")
    if once := sum(point["seeds"] == 1 for point in points):
        notes.append(f"{once} of {len(points)} have one seed")
    if negative := sum(point["gap"] <= 0 for point in points):
        notes.append(f"{negative} gaps are not above zero, which no power of anything is")
    return notes


def solve(matrix: np.ndarray, gaps: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Fit exp(matrix theta) to the gaps by Levenberg and Marquardt's method, from the fit of logarithms."""
    theta = np.linalg.lstsq(matrix, np.log(np.maximum(gaps, 1e-3)), rcond=None)[0]
    damping = 1e-2

    def error(at: np.ndarray) -> float:
        return float(np.sum((weights * (np.exp(np.clip(matrix @ at, -20, 5)) - gaps)) ** 2))

    for _ in range(200):
        model = np.exp(np.clip(matrix @ theta, -20, 5))
        slope, residual = matrix * (model * weights)[:, None], weights * (gaps - model)
        normal = slope.T @ slope
        step = np.linalg.solve(normal + damping * (np.diag(np.diag(normal)) + 1e-9 * np.eye(len(theta))), slope.T @ residual)
        better = error(theta + step) < error(theta)
        theta, damping = (theta + step, damping / 3) if better else (theta, damping * 3)
        if np.abs(step).max() < 1e-9 or damping > 1e9:
            break
    return theta


def intervals(matrix: np.ndarray, gaps: np.ndarray, weights: np.ndarray) -> tuple[list[float | None], list[float | None]]:
    """Return 5 % and 95 % of each parameter over rows drawn with replacement; None: most draws do not determine it."""
    generator, found = np.random.default_rng(0), []
    for _ in range(DRAWS):
        drawn = generator.integers(0, len(gaps), len(gaps))
        if np.linalg.matrix_rank(matrix[drawn]) == matrix.shape[1]:
            found.append(solve(matrix[drawn], gaps[drawn], weights[drawn]))
    if len(found) < DRAWS / 2 or len(gaps) == matrix.shape[1]:
        return [None] * matrix.shape[1], [None] * matrix.shape[1]
    low, high = np.percentile(np.array(found), (5, 95), axis=0)
    low[0], high[0] = np.exp(low[0]), np.exp(high[0])
    return low.tolist(), high.tolist()


def write_document(fitted: dict[str, Any], folder: Path) -> None:
    """Write docs/scaling.md and its plot."""
    lines = [
        "# How the gap to dense scales",
        "",
        "Validation loss above dense's at equal trainable parameters, by width, compression and tokens. Each row is a training of its own;",
        "the grid is unfinished and grows: `.venv/bin/python bench/scaling.py --next 5` trains the next five rows, `--status` lists them,",
        "`--fit` writes this page and `bench/results/scaling.json`, which has all of it as data.",
        "",
        f"Setting: {fitted['setting']}. `nothing` is the control: no value crosses, and only the last stage learns.",
        "Compression is what was measured, against bf16 both ways; the step size of entropy coding settles in the first steps, so its mean",
        "is a little off what was asked.",
        "",
        "![Gap to dense by compression, one panel for each width](scaling.png)",
        "",
        "## Curves",
        "",
        f"`{fitted['formula']}`",
        "",
        "In brackets 5 % to 95 % of fits to rows drawn with replacement; what a fit does not rest on stands behind it.",
        "",
        "| method | rows | a | b (compression) | e (width) | t (tokens) | rms off | notes |",
        "|---|---|---|---|---|---|---|---|",
        *(curve_line(method, found) for method, found in fitted["methods"].items()),
        "",
        "## Rows",
        "",
        "| method | corpus | D | parameters | tokens | fewer bytes | gap | seeds |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
        *(point_line(point) for point in sorted([*fitted["points"], *fitted["control"]], key=order)),
        "",
    ]
    write_atomic(folder / "scaling.md", "\n".join(lines).encode())
    write_atomic(folder / "scaling.png", plot(fitted))


def order(point: dict[str, Any]) -> tuple:
    """Sort points as people read them."""
    return point["corpus"] != CORPORA[0], point["width"], point["tokens"], point["method"], point["asked"]


def curve_line(method: str, found: dict[str, Any]) -> str:
    """Write a fit as a row of a table."""
    cells = []
    for name in "abet":
        part = found.get("parameters", {}).get(name)
        interval = f" [{part['low']:.3g}, {part['high']:.3g}]" if part and part["low"] is not None else ""
        cells.append(f"{part['value']:.3g}{interval}" if part else "-")
    off = f"{100 * found['residual']:.2f} %" if "residual" in found else "-"
    return f"| {TITLES[method]} | {found['rows']} | {' | '.join(cells)} | {off} | {'; '.join(found['notes'])} |"


def point_line(point: dict[str, Any]) -> str:
    """Write a point as a row of a table."""
    spread = f" ± {100 * point['spread']:.2f}" if point["spread"] is not None else ""
    times = f"{point['compression']:.1f}x" if point["compression"] else "-"
    title = TITLES.get(point["method"], "nothing (control)")
    sizes = f"{point['width']} | {point['parameters']:,} | {point['tokens']:,} | {times}"
    return f"| {title} | {point['corpus']} | {sizes} | {100 * point['gap']:+.2f}{spread} % | {point['seeds']} |"


def plot(fitted: dict[str, Any]) -> bytes:
    """Draw gaps by compression, one panel for each width, at its fewest tokens, where most rows are; the control as a line."""
    import io

    from matplotlib.figure import Figure

    points = [point for point in fitted["points"] if point["corpus"] == CORPORA[0]]
    widths = sorted({point["width"] for point in points})
    figure = Figure(figsize=(3.6 * len(widths) + 1.2, 3.6), layout="constrained")
    axes = figure.subplots(1, len(widths), sharey=True, squeeze=False)[0]
    for panel, width in zip(axes, widths, strict=True):
        fewest = min(point["tokens"] for point in points if point["width"] == width)
        here = [point for point in points if (point["width"], point["tokens"]) == (width, fewest)]
        for method, title in TITLES.items():
            line = sorted((point["compression"], 100 * point["gap"]) for point in here if point["method"] == method)
            if line:
                panel.plot(*zip(*line, strict=True), "o-", label=title, markersize=4)
        for point in fitted["control"]:
            if (point["width"], point["tokens"], point["corpus"]) == (width, fewest, CORPORA[0]):
                panel.axhline(100 * point["gap"], linestyle="--", color="grey", label="nothing crosses")
        panel.set(xscale="log", title=f"D = {width}, {fewest / 1e6:.1f} M tokens", xlabel="times fewer bytes")
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("loss above dense, %")
    axes[-1].legend(fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()
