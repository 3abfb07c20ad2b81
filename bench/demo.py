"""Train the `laptop` config uncompressed and in a subspace, for the same time each, and print both rows: `make demo`.

.venv/bin/python bench/demo.py [--seconds 60]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from thinwire.settings import parse_train
from thinwire.train import Trainer

SIDES = ("dense", "subspace")


def train(codec: str, seconds: float, folder: Path) -> dict:
    """Train one side and return its summary."""
    words = ["--config", "laptop", "--codec.name", codec, "--run", str(folder / codec), "--train.seconds", str(seconds)]
    words += ["--train.validate_every", "0", "--train.checkpoint_every", "0", "--train.validation_sequences", "64"]
    return Trainer(parse_train(words)).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="training time of each side")
    seconds = parser.parse_args().seconds
    console = Console()
    table = Table(title=f"laptop: 4 stages, 8 layers, {seconds:.0f} s of training each, all stages in one process")
    for heading in ("codec", "steps", "tokens/s", "validation loss", "bytes/token forward", "backward", "compression", "parameters"):
        table.add_column(heading, justify="left" if heading == "codec" else "right")
    with tempfile.TemporaryDirectory(prefix="thinwire-demo-") as folder:
        for codec in SIDES:
            console.print(f"[bold]{codec}[/bold]")
            row = train(codec, seconds, Path(folder))
            table.add_row(
                codec,
                str(row["steps"]),
                f"{row['tokens_per_second']:,.0f}" if row["tokens_per_second"] else "-",
                f"{row['val_loss']:.3f}",
                f"{row['bytes_per_token_forward']:.1f}",
                f"{row['bytes_per_token_backward']:.1f}",
                f"{row['compression']:.0f}x",
                f"{row['trainable_parameters']:,}",
            )
    console.print(table)


if __name__ == "__main__":
    main()
