"""`thinwire join` in processes of their own, as people start and lose them: no supervisor."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from faults.inject import Fault, Scene, arm
from patience import HANG, wait_until
from runs import unhurried

PRELOAD = ["thinwire.run.trainer", "thinwire.cluster.join", "thinwire.pipeline.worker"]


def be(words: list[str], out: str, faults: Sequence[Fault], hold: int | None) -> None:
    """Run a command with what it prints in a file, and with faults; stand still before a step, if wanted, until let go."""
    from thinwire.cli import main as cli

    if faults:
        struck = Path(f"{out}.struck")
        struck.mkdir()
        arm(list(faults), Scene(faults[0].stage, struck, Path(out)))
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{out}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    if hold is not None:
        hold_before(hold, Path(f"{out}.held"), Path(f"{out}.go"))
    with unhurried():
        code = cli.main(words)
    sys.exit(code)


def hold_before(step: int, held: Path, go: Path) -> None:
    """Let this process say that it has come to a step, and begin it when it may: nobody's clock decides what happens before."""
    from thinwire.model.stage import Stage

    forward = Stage.forward

    def waiting(self: Stage, ids: Any, payload: Any, context: Any) -> Any:
        if context.training and context.step >= step:
            held.touch()
            wait_until(go.exists)
        return forward(self, ids, payload, context)

    Stage.forward = waiting  # type: ignore[method-assign]


class Hand:
    """A person who starts commands, and the processes they became."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)
        self.started: list[Any] = []
        self.named: dict[str, Any] = {}

    def __enter__(self) -> Hand:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.started:
            process.kill()
            process.join()

    def start(self, words: list[str], name: str, faults: Sequence[Fault] = (), *, hold: int | None = None) -> Any:
        """Type a command; what it prints is in `name`.out and `name`.err.

        All faults are those of one stage. It stands still before step `hold` (the first is 0).
        """
        process = self.context.Process(target=be, args=(words, str(self.folder / name), faults, hold))
        process.start()
        self.started.append(process)
        self.named[name] = process
        return process

    def await_hold(self, name: str) -> None:
        """Return when a command has come to the step before which it stands still."""
        wait_until((self.folder / f"{name}.held").exists, alive=lambda: self.named[name].exitcode is None)

    def let_go(self, name: str) -> None:
        """Let a command go on, now or when it comes there."""
        (self.folder / f"{name}.go").touch()

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


def ended(process: Any) -> int:
    """Wait for a process; return its exit code."""
    process.join(HANG)
    assert process.exitcode is not None, "still running"
    return process.exitcode
