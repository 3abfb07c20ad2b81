"""Worker processes whose stages follow a plan that a test has chosen, in as little room as it can do with; slow memory that fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults import inject
from thinwire.cluster.membership import Membership
from thinwire.cluster.supervisor import run_workers
from thinwire.cluster.worker_process import Say
from thinwire.memory import attach
from thinwire.memory.blocks import Plan, Profile, base_bytes, floor_bytes
from thinwire.run.command import parse_train
from thinwire.run.stop import Stop

CHOICES = {"k": "keep", "r": "recompute", "o": "offload"}
DISK = getattr(os, "pwrite", None)


def force(letters: str, full_after: int | None = None) -> None:
    """Plan, from now on in this process, by letters, repeated over the blocks of a stage; the disk may be full some writes later."""

    def plan_for(profile: Profile, config: Any, depth: int) -> Plan:
        choices = tuple(CHOICES[letters[index % len(letters)]] for index in range(len(profile.blocks)))
        budget = base_bytes(profile, depth) + floor_bytes(profile.blocks, choices, depth)  # type: ignore[arg-type]
        attach.read_size = lambda text, word="": budget
        if full_after is not None:
            os.pwrite = full_disk(full_after)
        return Plan(choices, depth, budget, 1.0, 1.0)  # type: ignore[arg-type]

    attach.plan_for = plan_for  # type: ignore[assignment]


def full_disk(after: int) -> Callable[[int, Any, int], int]:
    """Return an `os.pwrite` whose disk is full after so many writes."""
    left = [after]

    def write(file: int, data: Any, place: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        assert DISK is not None  # not on Windows
        return DISK(file, data, place)

    return write


def train(
    member: Membership,
    say: Say,
    stop: Stop,
    letters: str,
    full_after: list[int | None],
    faults: list[dict[str, Any]],
    struck: str,
    **arguments: Any,
) -> dict[str, Any]:
    """Train one stage as `launch.train_worker` does, by a forced plan and with faults."""
    force(letters, full_after[member.stage] if full_after else None)
    return inject.train(member, say, stop, faults, struck, **arguments)


def train_forced(
    config: str, run: Path, letters: str, *words: str, full_after: tuple[int | None, ...] = (), faults: tuple[inject.Fault, ...] = ()
) -> dict[str, Any]:
    """Run `thinwire train` in workers that follow a plan; return its summary."""
    command = parse_train(
        ["--config", config, "--run", str(run), "--memory.budget", "1GB", "--pipeline.mode", "workers", "--train.threads", "1", *words]
    )
    arguments = {"run": str(command.run), "resume": command.resume, "letters": letters, "full_after": list(full_after)}
    arguments |= inject.given(list(faults), run.with_name(f"{run.name}-struck"))
    return run_workers(train, command.config, arguments, lambda stage, message: None, replacing={"replacing": True})[0]
