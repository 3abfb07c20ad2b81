"""The arithmetic of a comparison: curves and speeds in, standings out. No files, no text."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from thinwire.board.rows import Row, curve_of

if TYPE_CHECKING:
    from thinwire.board.subjects import Subject

Curve = Mapping[int, float]


def mean_curve(curves: Sequence[Curve]) -> dict[int, float]:
    """Average curves over seeds, at the steps that all of them have."""
    steps = set.intersection(*map(set, curves)) if curves else set()
    return {step: statistics.fmean(curve[step] for curve in curves) for step in sorted(steps)}


def value_at(curve: Curve, step: float) -> float | None:
    """Interpolate a curve linearly; None outside of it."""
    points = sorted(curve.items())
    for (left, low), (right, high) in itertools.pairwise(points):
        if left <= step <= right:
            return low + (high - low) * (step - left) / (right - left)
    return points[0][1] if len(points) == 1 and points[0][0] == step else None


@dataclass(frozen=True)
class Reached:
    """When a curve reached the target; `at_most`: it was there at its first validation, so it may have been earlier."""

    steps: float
    at_most: bool = False


def steps_to(curve: Curve, target: float) -> Reached | None:
    """Find where a curve first meets the target, interpolated linearly between validations."""
    points = sorted(curve.items())
    for number, (right, low) in enumerate(points):
        if low > target:
            continue
        if number == 0:
            return Reached(right, at_most=True)
        left, high = points[number - 1]
        return Reached(left + (right - left) * (high - target) / (high - low))
    return None


@dataclass(frozen=True)
class Pace:
    """How long the steps of a spec take on a link."""

    seconds: float
    warmup: int = 0
    """Steps at the start that cross uncompressed."""
    warmup_seconds: float = 0.0
    """What each of those takes."""

    def time(self, steps: float) -> float:
        """Return the seconds of so many steps."""
        slow = min(steps, self.warmup)
        return slow * self.warmup_seconds + (steps - slow) * self.seconds


@dataclass(frozen=True)
class OnLink:
    """How a spec stands on one link."""

    pace: Pace | None = None
    tokens_per_second: float | None = None
    time: float | None = None
    """Seconds to the target."""
    faster: float | None = None
    """The reference's time over its own."""


@dataclass(frozen=True)
class Standing:
    """How a spec stands."""

    label: str
    heading: str | None
    curve: dict[int, float] = field(default_factory=dict)
    seeds: int = 0
    """Learning rows there are."""
    parameters: int | None = None
    loss: float | None = None
    spread: float | None = None
    """Half the range over several seeds."""
    above: float | None = None
    """Loss above the reference's with the same seeds, in percent."""
    sent: dict[str, float] = field(default_factory=dict)
    """Bytes by part, as the subject splits them."""
    judged: float | None = None
    """Bytes of the parts that it is judged by."""
    fewer: float | None = None
    """The reference's such bytes over its own."""
    reached: Reached | None = None
    links: dict[str, OnLink] = field(default_factory=dict)
    peak_rss_bytes: float | None = None
    """Of the largest worker."""


@dataclass(frozen=True)
class SpecRows:
    """A spec and its rows, as far as they are there."""

    label: str
    heading: str | None
    warmup: int
    learn: Sequence[Row]
    speed: Mapping[str, Row]


@dataclass(frozen=True)
class Board:
    """All standings and what they were judged by."""

    standings: list[Standing]
    target: float | None
    subject: Subject


def reference_of(entries: Sequence[SpecRows], subject: Subject) -> SpecRows | None:
    """Return the entry that others are judged by, where it is among them."""
    return next((entry for entry in entries if entry.label == subject.reference), None)


def find_target(entries: Sequence[SpecRows], steps: int, subject: Subject) -> float | None:
    """Return the reference's validation loss at half of the steps; None while it has no curve."""
    found = reference_of(entries, subject)
    return value_at(mean_curve([curve_of(row) for row in found.learn]), steps / 2) if found and found.learn else None


def score(entries: Sequence[SpecRows], links: Sequence[str], target: float | None, subject: Subject) -> Board:
    """Judge all entries against the target and against the reference."""
    plain = reference_of(entries, subject)
    reference = stand(plain, links, target, subject, None, None) if plain else None
    return Board([stand(entry, links, target, subject, reference, plain) for entry in entries], target, subject)


def stand(
    entry: SpecRows, links: Sequence[str], target: float | None, subject: Subject, reference: Standing | None, plain: SpecRows | None
) -> Standing:
    """Judge one entry; `plain` is the reference's and `reference` how that stands."""
    curve = mean_curve([curve_of(row) for row in entry.learn])
    reached = steps_to(curve, target) if target is not None else None
    losses = [row["val_loss"] for row in entry.learn]
    sent = {part: statistics.fmean(row[f"{subject.unit}_{part}"] for row in entry.learn) for part in subject.parts} if losses else {}
    judged = sum(sent[part] for part in subject.judged) if sent else None
    peaks = [max(row["peak_rss_bytes"]) for row in entry.speed.values()]
    return Standing(
        label=entry.label,
        heading=entry.heading,
        curve=curve,
        seeds=len(losses),
        parameters=entry.learn[0]["trainable_parameters"] if losses else None,
        loss=mean_of(losses),
        spread=(max(losses) - min(losses)) / 2 if len(losses) > 1 else None,
        above=loss_above(entry.learn, plain.learn if plain else ()),
        sent=sent,
        judged=judged,
        fewer=ratio(reference.judged if reference else None, judged),
        reached=reached,
        links={link: on_link(entry, link, reached, reference, plain) for link in links},
        peak_rss_bytes=max(peaks) if peaks else None,
    )


def loss_above(rows: Sequence[Row], plain: Sequence[Row]) -> float | None:
    """Return how far the losses lie above the reference's with the same seeds, in percent; None where no seed has both."""
    pairs = [(row["val_loss"], other["val_loss"]) for row in rows for other in plain if row["seed"] == other["seed"]]
    return 100 * (sum(own for own, _ in pairs) / sum(other for _, other in pairs) - 1) if pairs else None


def on_link(entry: SpecRows, link: str, reached: Reached | None, reference: Standing | None, plain: SpecRows | None) -> OnLink:
    """Judge an entry on one link; an uncompressed warm-up takes the reference's time, and is unknown without it."""
    row, uncompressed = entry.speed.get(link), plain.speed.get(link) if plain else None
    if row is None or (entry.warmup and uncompressed is None):
        return OnLink(tokens_per_second=row["tokens_per_second"] if row else None)
    pace = Pace(row["seconds_per_step"], entry.warmup, uncompressed["seconds_per_step"] if uncompressed else 0.0)
    time = pace.time(reached.steps) if reached else None
    return OnLink(pace, row["tokens_per_second"], time, ratio(reference.links[link].time if reference else None, time))


def mean_of(values: Sequence[float]) -> float | None:
    """Return the mean, None of nothing."""
    return statistics.fmean(values) if values else None


def ratio(above: float | None, below: float | None) -> float | None:
    """Divide where both are known."""
    return above / below if above is not None and below else None
