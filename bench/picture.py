"""The picture of the README: loss against time over an emulated 2 Mbit/s line, from the committed rows of the scoreboard.

    .venv/bin/python bench/picture.py [--out docs/loss_over_2mbps.png]

Nothing is trained: time is steps x seconds per step, as on the board `1-final` (docs/scoreboard.md), and so is the target.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from thinwire.board.plots import STYLE, figure_bytes
from thinwire.board.score import mean_curve, steps_to
from thinwire.util.files import write_atomic

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "docs" / "scoreboard"
LINK, STEPS = "dsl_2mbps", 600
ANCHORED = "anchored-rank32-bits4-anchorsfactorised-ngrams2-buckets8192-model.ffn504"
SIDES = {
    "dense": ("uncompressed (bf16)", "black"),
    "quantize-bits4": ("4 bits per value, 3.9x fewer bytes", "C0"),
    "subspace-rank16": ("subspace, K = 16 of 256, 15.5x fewer bytes", "C1"),
    ANCHORED: ("anchored, K = 32 in 4 bits, 27x fewer bytes", "C3"),
}
"""Row files of each side, what people call it, and its colour."""


@dataclass(frozen=True)
class Side:
    """What the rows say of one method."""

    curve: dict[int, float]
    seconds_per_step: float

    def seconds_to(self, loss: float) -> float:
        """Return when the loss was reached."""
        reached = steps_to(self.curve, loss)
        assert reached is not None
        return reached.steps * self.seconds_per_step


def read_side(name: str) -> Side:
    """Read a method's rows; several seeds are averaged."""
    learnt = [json.loads(path.read_text()) for path in sorted((ROWS / "learn").glob(f"{name}-{STEPS}-[0-9].json"))]
    speed = json.loads((ROWS / "speed" / f"{name}-{LINK}.json").read_text())
    curves = [{int(step): loss for step, loss in row["curve"].items()} for row in learnt]
    return Side(mean_curve(curves), speed["seconds_per_step"])


def draw(sides: dict[str, Side], target: float) -> bytes:
    """Draw all curves and when each reaches the target."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.0, 3.6), layout="constrained")
        axes = figure.add_subplot()
        for name, side in sides.items():
            label, colour = SIDES[name]
            minutes = [step * side.seconds_per_step / 60 for step in side.curve]
            at = side.seconds_to(target) / 60
            axes.plot(minutes, list(side.curve.values()), color=colour, linewidth=2, label=f"{label}: {at:.0f} min")
            axes.plot([at], [target], "o", color=colour)
        axes.axhline(target, color="grey", linestyle="--", linewidth=1)
        axes.annotate(
            f"loss {target:.2f}", (86, target), (0, 3), textcoords="offset points", ha="right", va="bottom", fontsize=9, color="grey"
        )
        axes.set(xlabel="minutes on 2 Mbit/s, 20 ms (emulated)", ylabel="validation loss", xlim=(0, 88), ylim=(3.8, 5.7))
        axes.legend(loc="upper right", frameon=False, title=f"minutes to a loss of {target:.2f}", title_fontsize=9, alignment="left")
        return figure_bytes(figure, "png")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the picture of the README.")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "loss_over_2mbps.png")
    arguments = parser.parse_args()
    sides = {name: read_side(name) for name in SIDES}
    target = sides["dense"].curve[STEPS // 2]
    for name, side in sides.items():
        print(f"{name}: {side.seconds_to(target):,.0f} s to {target:.3f}")
    write_atomic(arguments.out, draw(sides, target))
    print(arguments.out)


if __name__ == "__main__":
    main()
