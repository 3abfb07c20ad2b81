"""Run a small training through faults, and judge it: the same bits, or a clean refusal that leaves the last checkpoint whole."""

from __future__ import annotations

import json
import os
from pathlib import Path

from faults.inject import Fault, command_with, train_with
from runs import train

STAGES, STEPS = 4, 12
WORDS = ("--pipeline.stages", str(STAGES), "--train.steps", str(STEPS), "--train.checkpoint_every", "3", "--train.threads", "1")
LATER = {"forward": 9, "backward": 9, "optimizer": 5, "write": 2}
"""How often a stage has passed a point when it is struck: in the middle of the run, between two checkpoints."""


def run_with(settings: str, folder: Path, faults: list[Fault], *words: str) -> tuple[list[str], list[tuple[int, dict]]]:
    """Train through faults; return the hashes, and what was heard from the stages. Every fault must have struck."""
    heard: list[tuple[int, dict]] = []
    command = ["--config", settings, "--run", str(folder / "run"), *WORDS, *words]
    summary = train_with(command, faults, folder / "struck", heard)
    assert_struck(folder, faults)
    lines = (folder / "run/metrics/stage-0.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, summary["steps"] + 1))
    return summary["weights_sha256"], heard


def assert_struck(folder: Path, faults: list[Fault]) -> None:
    """Check that every fault was met."""
    missing = {f"struck-{fault.name}" for fault in faults} - set(os.listdir(folder / "struck"))
    assert not missing, f"did not strike: {missing}"


def restored(heard: list[tuple[int, dict]], stage: int = 0) -> list[int]:
    """Return the steps from which a stage went on after a loss."""
    return [message["restored"] for who, message in heard if who == stage and "restored" in message]


def refused_with(settings: str, folder: Path, faults: list[Fault], *words: str) -> int:
    """Train into a fault that ends the run; return the exit code. Standard error is the caller's to judge."""
    code = command_with(["--config", settings, "--run", str(folder / "run"), *WORDS, *words], faults, folder / "struck")
    assert_struck(folder, faults)
    return code


def resumed(settings: str, run: Path, *words: str) -> list[str]:
    """Go on, in one process and without faults; return the hashes."""
    return train(settings, run, "--resume", *WORDS, *words)["weights_sha256"]


def process_figures(pid: int) -> dict[str, int]:
    """Return threads, open files and resident KB of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "threads": int(status["Threads"]),
        "files": len(os.listdir(f"/proc/{pid}/fd")),
        "resident": int(status["VmRSS"].split()[0]),
    }
