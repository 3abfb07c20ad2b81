"""Train a model: `thinwire train --config laptop --run runs/first`; or one stage of it on this machine: `thinwire join`."""

from __future__ import annotations

from thinwire.cluster.training import train_on_this_machine
from thinwire.run.command import parse_train
from thinwire.run.farewell import farewell, go_on_command, last_words


def main(argv: list[str]) -> None:
    """Run the `train` verb."""
    command = parse_train(argv)
    steps, replicas = command.config.train.steps, command.config.replicas.count
    go_on = go_on_command("train", command.run)
    with farewell(command.run, go_on, replicas):
        summary = train_on_this_machine(command)
    if summary["val_loss"] is not None:
        print(f"validation loss {summary['val_loss']:.4f} after {summary['steps']} steps; {command.run / 'summary.json'}")
    if summary["val_loss"] is None or summary["steps"] < steps:
        print(last_words(summary, command.run, go_on, replicas))
