"""Where the model is cut: which layers each stage runs. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from thinwire.config.sections import ModelConfig


@dataclass(frozen=True)
class StagePlan:
    """Which layers a stage runs; a boundary is named by the global layer it stands in front of."""

    index: int
    count: int
    layers: range

    @cached_property
    def first(self) -> bool:
        return self.index == 0

    @cached_property
    def last(self) -> bool:
        return self.index == self.count - 1


def cut_layers(layers: int, stages: int, split: str | None = None) -> list[range]:
    """Deal `layers` to `stages` by the given split, else evenly with the remainder to the earlier stages."""
    if not 1 <= stages <= layers:
        raise ValueError(f"pipeline.stages is {stages} for {layers} layers; choose 1 to {layers}, a stage needs at least one layer")
    counts = parse_split(split) if split else [layers // stages + (index < layers % stages) for index in range(stages)]
    if len(counts) != stages:
        raise ValueError(f"pipeline.split {split!r} names {len(counts)} stages, pipeline.stages is {stages}; make them agree")
    if sum(counts) != layers or min(counts) < 1:
        raise ValueError(f"pipeline.split {split!r} adds up to {sum(counts)} layers, the model has {layers}; each stage needs at least one")
    starts = [sum(counts[:index]) for index in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def constrained_layers(model: ModelConfig, ranges: list[range]) -> int:
    """Count the layers that a constraining codec binds: all but the free ones, which fill the last stage unless the model says."""
    last = len(ranges[-1])
    free = last if model.free_layers is None else model.free_layers
    if free > last:
        raise ValueError(
            f"model.free_layers is {free} but the last stage has {last} layer{'s' * (last > 1)} and no boundary can stand between free "
            f"layers: give the last stage at least {free}{split_advice(model.layers, len(ranges), free)}"
        )
    return model.layers - free


def split_advice(layers: int, stages: int, free: int) -> str:
    """Name a split whose last stage holds the free layers, if there is one."""
    if layers - free < stages - 1:
        return f"; with so many stages that cannot be, choose pipeline.stages {layers - free + 1} or fewer"
    rest = cut_layers(layers - free, stages - 1)
    return f", such as --pipeline.split {','.join(str(len(part)) for part in rest)},{free}"


def parse_split(split: str) -> list[int]:
    """Read a split such as 2,2,3,1."""
    try:
        return [int(part) for part in split.split(",")]
    except ValueError:
        raise ValueError(f"pipeline.split is {split!r}; write layers per stage with commas, such as 2,2,3,1") from None
