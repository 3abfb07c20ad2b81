"""Names of checkpoints: `step-000200`, and with a lineage, `step-000400-1-5e0c2a91`, after a run was resumed in another shape."""

from __future__ import annotations

import re
from pathlib import Path

NAME = re.compile(r"step-([0-9]{6,12})((?:-[0-9]{1,6}-[0-9a-f]{8})?)")


def checkpoint_name(step: int, lineage: str = "") -> str:
    """Return the name of a checkpoint; `lineage` is what names end in during one stretch of a run."""
    return f"step-{step:06d}{lineage}"


def is_checkpoint_name(name: str) -> bool:
    """Tell whether a name is that of a checkpoint."""
    return NAME.fullmatch(name) is not None


def age(folder: Path | str) -> tuple[int, int, str]:
    """Return what orders checkpoints: the step, and at the same step how often the shape had changed; step -1 for any other name."""
    match = NAME.fullmatch(Path(folder).name)
    return (int(match[1]), int(match[2].split("-")[1]) if match[2] else 0, match[2]) if match else (-1, 0, "")


def checkpoints_in(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, oldest first."""
    return sorted((each for each in folder.glob("step-*") if NAME.fullmatch(each.name)), key=age)


def newer_in(folder: Path, step: int, lineage: str = "") -> list[Path]:
    """List the checkpoints in a folder that are of later steps, in one stretch of a run."""
    return [each for each in checkpoints_in(folder) if age(each)[0] > step and age(each)[2] == lineage]


def step_of(folder: Path | str) -> int:
    """Return the step of a checkpoint, of its folder or its name; -1 for any other."""
    return age(folder)[0]
