"""Faults on purpose, at named points of a worker's life: what `crew` is given instead of the plain task of training.

A fault strikes once: a file with its name says that it has. Points are places in the package that every step passes:

    forward      before a stage computes a microbatch
    backward     while it sends a gradient to the stage before
    optimizer    between the first and the last parameter of an update
    write        between the tensors and the manifest of a checkpoint
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinwire import launch
from thinwire.crew import Say, run_crew
from thinwire.seat import Seat
from thinwire.settings import TrainCommand, parse_train
from thinwire.stop import Stop

POINTS = ("forward", "backward", "optimizer", "write")


@dataclass(frozen=True)
class Fault:
    """Strike a stage the `number`-th time that it passes a point."""

    stage: int
    point: str
    number: int = 1
    action: str = "kill"

    def strike(self, folder: Path) -> None:
        """Do it, once."""
        mark = folder / f"struck-{self.stage}-{self.point}-{self.number}-{self.action}"
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            return
        ACTIONS[self.action]()


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


ACTIONS: dict[str, Callable[[], None]] = {"kill": _kill, "freeze": _freeze}


def arm(faults: list[Fault], stage: int, folder: Path) -> None:
    """Put the faults of a stage into the package of this process, which exists for one run."""
    from thinwire import checkpoint
    from thinwire.model.stages import Stage
    from thinwire.optimizer import StageOptimizer
    from thinwire.pipeline.backend import Port

    passed = dict.fromkeys(POINTS, 0)

    def passing(point: str) -> None:
        passed[point] += 1
        for fault in faults:
            if (fault.stage, fault.point, fault.number) == (stage, point, passed[point]):
                fault.strike(folder)

    def before(owner: Any, name: str, point: str, wanted: Callable[..., bool] = lambda *given: True) -> None:
        original = getattr(owner, name)

        def wrapped(*given: Any, **words: Any) -> Any:
            if wanted(*given):
                passing(point)
            return original(*given, **words)

        setattr(owner, name, wrapped)

    before(Stage, "forward", "forward", lambda stage, ids, payload, context: context.training)
    before(Port, "send", "backward", lambda port, tensor: port.outgoing[0].direction == "backward" and port.counting)
    before(StageOptimizer, "step", "optimizer")
    before(checkpoint, "write_atomic", "write")


def train(seat: Seat, say: Say, stop: Stop, faults: list[dict[str, Any]], struck: str, **arguments: Any) -> dict[str, Any]:
    """Train as `launch.train` does, with faults."""
    arm([Fault(**fault) for fault in faults], seat.stage, Path(struck))
    return launch.train(seat, say, stop, **arguments)


def train_with(words: list[str], faults: list[Fault], struck: Path, heard: list[tuple[int, dict]] | None = None) -> dict[str, Any]:
    """Run `thinwire train` in workers that meet these faults; return its summary. `heard` gets what stages say besides their steps."""
    command: TrainCommand = parse_train([*words, "--pipeline.mode", "workers"])
    struck.mkdir(parents=True, exist_ok=True)
    arguments = {"run": str(command.run), "resume": False, "faults": [asdict(fault) for fault in faults], "struck": str(struck)}

    def hear(stage: int, message: dict[str, Any]) -> None:
        if heard is not None and "step" not in message:
            heard.append((stage, message | {"at": time.monotonic()}))

    return run_crew(train, command.config, arguments, hear, replacing={"replacing": True})[0]
