"""`make demo`: four workers over an emulated 2 Mbit/s line, uncompressed against subspace, the same time each.

    .venv/bin/python bench/demo.py [--seconds 50] [--profile dsl_2mbps] [--out runs/demo]

Prints a live table of stages and links, at the end one table, and draws the loss against wall-clock time.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from thinwire.launch import launch
from thinwire.link.profile import find_profile
from thinwire.settings import parse_train

SIDES = ("dense", "subspace")


def train(codec: str, arguments: argparse.Namespace) -> tuple[dict, list[dict]]:
    """Train one side with real workers; return its summary and the lines of stage 0's metrics."""
    run = arguments.out / codec
    words = ["--config", "laptop", "--codec.name", codec, "--run", str(run), "--link.profile", arguments.profile]
    words += ["--train.seconds", str(arguments.seconds), "--train.warmup", "10"]
    words += ["--train.validate_every", "0", "--train.checkpoint_every", "0", "--train.validation_sequences", "64"]
    summary = launch(parse_train(words))
    return summary, [json.loads(line) for line in (run / "metrics" / "stage-0.jsonl").read_text().splitlines()]


def seconds_to(lines: list[dict], loss: float) -> float | None:
    """Return when the training loss first was as low as `loss`."""
    return next((line["seconds"] for line in lines if line["loss"] <= loss), None)


def report(results: dict[str, tuple[dict, list[dict]]], arguments: argparse.Namespace) -> Table:
    """Put both sides into one table."""
    rate = find_profile(arguments.profile).up_mbps
    target = results["dense"][1][-1]["loss"]
    table = Table(
        title=f"laptop, 4 workers, {arguments.profile}, {arguments.seconds:.0f} s each; bytes per token there and back", box=SIMPLE_HEAD
    )
    headings = ["codec", "steps", "tokens/s", "loss", "val", "there", "back", "link", f"s to {target:.2f}"]
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "codec" else "right")
    for codec, (summary, lines) in results.items():
        reached = seconds_to(lines, target)
        use = sum(line["right_mbps"] for line in lines) / len(lines)
        table.add_row(
            codec,
            str(summary["steps"]),
            f"{summary['tokens_per_second'] or 0:,.0f}",
            f"{lines[-1]['loss']:.3f}",
            f"{summary['val_loss']:.3f}",
            f"{summary['bytes_per_token_forward']:.1f}",
            f"{summary['bytes_per_token_backward']:.1f}",
            f"{100 * use / rate:.0f} %" if rate else f"{use:.1f} Mbit/s",
            "not reached" if reached is None else f"{reached:.0f}",
        )
    return table


def draw(results: dict[str, tuple[dict, list[dict]]], path: Path, title: str) -> None:
    """Plot the training loss of both sides against wall-clock time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for codec, (_, lines) in results.items():
        axes.plot([line["seconds"] for line in lines], [line["loss"] for line in lines], marker="o", markersize=3, label=codec)
    axes.set(xlabel="seconds of training", ylabel="training loss", title=title)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=50.0, help="training time of each side")
    parser.add_argument("--profile", default="dsl_2mbps", help="link profile to emulate")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the runs and the picture")
    arguments = parser.parse_args()
    for codec in SIDES:
        shutil.rmtree(arguments.out / codec, ignore_errors=True)
    console = Console()
    results = {}
    for codec in SIDES:
        console.print(f"{codec}: starting 4 workers over {arguments.profile}")
        results[codec] = train(codec, arguments)
    picture = arguments.out / "loss.png"
    draw(results, picture, f"laptop over {arguments.profile}, 4 workers")
    console.print(report(results, arguments))
    console.print(f"loss against time: {picture}")


if __name__ == "__main__":
    main()
