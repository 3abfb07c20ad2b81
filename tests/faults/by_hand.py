"""`thinwire join` in processes of their own, as people start and lose them: no supervisor."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from faults.inject import Fault, Scene, arm

PRELOAD = ["thinwire.train", "thinwire.join", "thinwire.pipeline.worker"]


def be(words: list[str], out: str, faults: Sequence[Fault] = ()) -> None:
    """Run a command with what it prints in a file, and with faults."""
    from thinwire import cli

    if faults:
        struck = Path(f"{out}.struck")
        struck.mkdir()
        arm(list(faults), Scene(faults[0].stage, struck, Path(out)))
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{out}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.exit(cli.main(words))


class Hand:
    """A person who starts commands, and the processes they became."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)
        self.started: list[Any] = []

    def __enter__(self) -> Hand:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.started:
            process.kill()
            process.join()

    def start(self, words: list[str], name: str, faults: Sequence[Fault] = ()) -> Any:
        """Type a command; what it prints is in `name`.out and `name`.err. All faults are those of one stage."""
        process = self.context.Process(target=be, args=(words, str(self.folder / name), faults))
        process.start()
        self.started.append(process)
        return process

    def printed(self, name: str) -> tuple[str, str]:
        """Return what a command printed so far."""
        return tuple((self.folder / f"{name}.{each}").read_text() for each in ("out", "err"))  # type: ignore[return-value]


def signal_to(process: Any, number: signal.Signals) -> None:
    os.kill(process.pid, number)


def steps_done(run: Path, stage: int | str) -> int:
    """Return the last step in a stage's metrics, or in those of `all` in one process."""
    path = run / f"metrics/stage-{stage}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    """Return when something holds; fail when it does not in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)
