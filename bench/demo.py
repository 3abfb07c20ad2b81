"""`make demo`: four workers over an emulated 2 Mbit/s line, uncompressed against subspace, the same training time each.

    .venv/bin/python bench/demo.py [--seconds 50] [--batch 6] [--profile dsl_2mbps] [--out runs/demo]

Prints a live table of stages and links, at the end one table, and draws the loss against time and against the bytes sent. The batch is
small, so that the uncompressed side does a dozen steps in its time: both sides train on the same batches, one of them gets further.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from thinwire.cluster.launch import launch
from thinwire.config.profiles import find_profile
from thinwire.run.command import parse_train

SIDES = ("dense", "subspace")
STAGES = 4
RECENT = 4
"""Steps whose mean loss is compared: that of one small batch says little."""

Result = tuple[dict, list[dict]]
"""The summary of a side and the lines of stage 0's metrics."""


def train(codec: str, arguments: argparse.Namespace) -> Result:
    """Train one side with real workers."""
    run = arguments.out / codec
    words = ["--config", "laptop", "--codec.name", codec, "--run", str(run), "--link.profile", arguments.profile]
    words += ["--pipeline.stages", str(STAGES), "--train.batch", str(arguments.batch), "--pipeline.microbatches", str(arguments.batch)]
    words += ["--train.seconds", str(arguments.seconds), "--train.warmup", "10"]
    words += ["--train.validate_every", "0", "--train.checkpoint_every", "0", "--train.validation_sequences", "64"]
    summary = launch(parse_train(words))
    return summary, [json.loads(line) for line in (run / "metrics" / "stage-0.jsonl").read_text().splitlines()]


def recent(lines: list[dict], index: int) -> float:
    """Return the mean training loss of the steps up to one of them."""
    losses = [line["loss"] for line in lines[max(0, index + 1 - RECENT) : index + 1]]
    return sum(losses) / len(losses)


def seconds_to(lines: list[dict], loss: float) -> float | None:
    """Return when the mean training loss first was as low as `loss`."""
    return next((line["seconds"] for index, line in enumerate(lines) if recent(lines, index) <= loss), None)


def described(arguments: argparse.Namespace) -> str:
    """Say what was measured: the same for table and picture."""
    profile = find_profile(arguments.profile)
    rate = f"{profile.up_mbps:g} Mbit/s and {profile.delay_ms:g} ms each way" if profile.up_mbps else "no limit"
    return f"laptop, {STAGES} workers on one machine, links of {rate} (emulated), {arguments.batch} sequences per step"


def report(results: dict[str, Result], arguments: argparse.Namespace) -> Table:
    """Put both sides into one table."""
    rate = find_profile(arguments.profile).up_mbps
    dense = results["dense"][1]
    target = recent(dense, len(dense) - 1)
    title = f"{described(arguments)}; {arguments.seconds:.0f} s of training each; bytes per token there and back"
    table = Table(title=title, box=SIMPLE_HEAD)
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
            f"{recent(lines, len(lines) - 1):.3f}",
            f"{summary['val_loss']:.3f}",
            f"{summary['bytes_per_token_forward']:.1f}",
            f"{summary['bytes_per_token_backward']:.1f}",
            f"{100 * use / rate:.0f} %" if rate else f"{use:.1f} Mbit/s",
            "not reached" if reached is None else f"{reached:.0f}",
        )
    return table


def label(codec: str, summary: dict) -> str:
    """Name a side and what it sends."""
    there, back = summary["bytes_per_token_forward"], summary["bytes_per_token_backward"]
    return f"{codec}: {summary['steps']} steps, {there:,.0f} + {back:,.0f} bytes per token"


def megabytes(summary: dict, lines: list[dict]) -> list[float]:
    """Return what had crossed each boundary, both ways together, after each step."""
    each = summary["bytes_per_token_forward"] + summary["bytes_per_token_backward"]
    return [line["tokens"] * each / 1e6 for line in lines]


def draw(results: dict[str, Result], path: Path, arguments: argparse.Namespace) -> None:
    """Plot the training loss of both sides against time, and against the bytes over each boundary."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (times, sizes) = pyplot.subplots(1, 2, figsize=(11, 4.6), sharey=True)
    for codec, (summary, lines) in results.items():
        form = {"marker": "o", "markersize": 3, "linewidth": 1, "label": label(codec, summary)}
        losses = [line["loss"] for line in lines]
        times.plot([line["seconds"] for line in lines], losses, **form)
        sizes.plot(megabytes(summary, lines), losses, **form)
    times.set(
        xlabel="seconds of training", ylabel="training loss of each step's batch", title=f"{arguments.seconds:.0f} s of training each"
    )
    sizes.set(xlabel="MB over each boundary, both ways", xscale="log", title="the bytes it took")
    sizes.xaxis.set_major_formatter("{x:g}")
    times.set_xlim(left=0)
    for axes in (times, sizes):
        axes.grid(alpha=0.3)
    times.legend(fontsize=8)
    figure.suptitle(described(arguments), fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=50.0, help="training time of each side")
    parser.add_argument("--batch", type=int, default=6, help="sequences per step, and microbatches")
    parser.add_argument("--profile", default="dsl_2mbps", help="link profile to emulate")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the runs and the picture")
    arguments = parser.parse_args()
    for codec in SIDES:
        shutil.rmtree(arguments.out / codec, ignore_errors=True)
    console = Console()
    results = {}
    for codec in SIDES:
        console.print(f"{codec}: {STAGES} workers over {arguments.profile}, {arguments.seconds:.0f} s of training, then validation")
        results[codec] = train(codec, arguments)
    picture = arguments.out / "loss.png"
    draw(results, picture, arguments)
    console.print(report(results, arguments))
    console.print(f"loss against time and bytes: {picture}")


if __name__ == "__main__":
    main()
