"""What a comparison is of: boundary methods, or exchanges between replicas. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Subject:
    """What is compared, by which bytes, and against which of them."""

    noun: str
    """What one of them is called."""
    reference: str
    """Spec that all others are judged by."""
    unit: str
    """What row files count bytes by: the first half of their names for them."""
    parts: tuple[str, ...]
    """What bytes are split into: the second half."""
    judged: tuple[str, ...]
    """Parts that together are what a method saves or not."""
    axis: str
    """What a plot calls them."""
    scale: int
    """Bytes by which plots and tables count."""
    out: Path
    """Where boards go unless told otherwise."""
    page: bool
    """Whether all boards are put together on one page beside that folder; else each is a page with its plots."""

    def counts(self, row: dict) -> dict[str, float]:
        """Return the bytes of a learning row by part."""
        return {part: row[f"{self.unit}_{part}"] for part in self.parts}


CODECS = Subject(
    noun="codec",
    reference="dense",
    unit="bytes_per_token",
    parts=("forward", "backward"),
    judged=("forward", "backward"),
    axis="bytes per token and boundary, both directions",
    scale=1,
    out=Path("out/board"),
    page=True,
)
EXCHANGES = Subject(
    noun="exchange",
    reference="allreduce",
    unit="bytes_per_step",
    parts=("exchange", "boundary", "control"),
    judged=("exchange",),
    axis="KB exchanged per step, all workers together",
    scale=1000,
    out=Path("out/exchanges"),
    page=False,
)
