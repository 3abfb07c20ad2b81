"""What a seed decides before the run begins: how many workers there are, and what happens to them when."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

from thinwire.codecs.base import CodecOptions
from thinwire.config.sections import LinkConfig, ModelConfig, PipelineConfig, ReplicasConfig, RunConfig, TrainConfig

Kind = Literal["reset", "cut", "isolate", "crash", "freeze", "full disk", "lose", "stop", "stop now", "stuck", "twin"]
WEIGHTED: dict[Kind, int] = {
    "reset": 5,
    "cut": 3,
    "isolate": 3,
    "crash": 6,
    "freeze": 3,
    "full disk": 2,
    "lose": 3,
    "stop": 1,
    "stop now": 1,
    "stuck": 1,
    "twin": 3,
}
SHORT_SECONDS = 3.0
LONG_SECONDS = 15.0
"""Of what does not end the run, and of what lets the others look for a replacement."""
RECONNECT_SECONDS = 30.0
STANDBY_SECONDS = 6.0
MOST_STEPS = 5
RUN_SECONDS = 1.2
"""About as long as an undisturbed run takes."""


@dataclass(frozen=True)
class Fault:
    """Something that happens to a machine."""

    at: float
    kind: Kind
    machine: int
    other: int
    """Another machine, where it takes two."""
    seconds: float
    """How long it lasts; of a crash: until the process is started again."""
    disk: bool = False
    """Whether the disk is lost too."""


@dataclass(frozen=True)
class Shape:
    """What a run is, whatever happens to it."""

    stages: int
    replicas: int
    steps: int
    every: int
    """Steps between checkpoints."""

    @property
    def config(self) -> RunConfig:
        return RunConfig(
            device="cpu",
            codec=CodecOptions(name="dense", dtype="fp32"),
            model=ModelConfig(layers=self.stages, width=8, context=2, vocabulary=64, heads=1, kv_heads=1, ffn=8),
            train=TrainConfig(
                steps=self.steps,
                batch=self.replicas,
                checkpoint_every=self.every,
                validate_every=0,
                validation_sequences=1,
                warmup=0,
                decay=0.0,
                stuck_seconds=5.0,
            ),
            pipeline=PipelineConfig(stages=self.stages, microbatches=1),
            replicas=ReplicasConfig(count=self.replicas),
            link=LinkConfig(ping_seconds=1.0, silent_seconds=3.0, reconnect_seconds=RECONNECT_SECONDS, standby_seconds=STANDBY_SECONDS),
        )


@dataclass(frozen=True)
class Plan:
    """One seed's run."""

    seed: int
    shape: Shape
    standbys: int
    supervised: bool
    """Whether all processes are on one machine: one folder, no copies, and a supervisor that starts the lost again at once."""
    faults: tuple[Fault, ...]
    clocks: tuple[tuple[float, float], ...] = field(default=())
    """Offset and rate of each machine's clock."""

    @property
    def workers(self) -> int:
        return self.shape.stages * self.shape.replicas

    def must_finish(self, begun_at: float) -> bool:
        """Tell whether nothing happens to a run that has begun then which it does not survive, so that it has to reach its last step.

        One machine may be away for good, or for long, if there is a standby to take its place.
        """
        passing = [fault for fault in self.faults if fault.kind in ("reset", "cut", "crash", "freeze") and fault.seconds <= SHORT_SECONDS]
        away = [fault for fault in self.faults if fault not in passing]
        replaceable = all(fault.kind in ("lose", "crash", "isolate") and begun_at < fault.at < 10 * RUN_SECONDS for fault in away)
        safe = {fault.kind for fault in passing} <= {"reset"} and all(fault.machine < self.workers for fault in away)
        if sum(fault.disk for fault in self.faults) > 1:
            return False
        return not away or (len(away) == 1 and replaceable and safe and self.standbys > 0)


def make_plan(seed: int) -> Plan:
    """Draw everything from the seed."""
    draw = random.Random(f"plan {seed}")
    stages, replicas = draw.choice([(2, 1), (3, 1), (3, 1), (3, 1), (4, 1), (4, 1), (5, 1), (2, 2), (2, 2), (3, 2)])
    supervised = draw.random() < 0.3
    standbys = 0 if supervised or stages * replicas > 4 else draw.choice([0, 1, 1, 2])
    shape = Shape(stages, replicas, steps=draw.randint(3, MOST_STEPS), every=draw.randint(1, 2))
    machines = stages * replicas + standbys
    faults = [make_fault(draw, machines) for _ in range(draw.choice([0, 1, 1, 2, 2, 3, 4]))]
    if supervised:
        faults = [fault for fault in faults if fault.kind not in ("isolate", "lose", "cut", "twin")]
    clocks = [(draw.uniform(1.0, 1e5), draw.uniform(0.97, 1.03)) for _ in range(machines)]
    return Plan(seed, shape, standbys, supervised, tuple(sorted(faults, key=lambda fault: fault.at)), tuple(clocks))


def make_fault(draw: random.Random, machines: int) -> Fault:
    """Draw one."""
    kind = draw.choices(list(WEIGHTED), weights=list(WEIGHTED.values()))[0]
    machine, other = draw.sample(range(machines), 2)
    long = draw.random() < 0.3 and kind != "twin"  # which is to come back while the run goes on
    seconds = draw.uniform(SHORT_SECONDS, LONG_SECONDS) if long else draw.uniform(0.05, SHORT_SECONDS)
    at = draw.uniform(0.0, RUN_SECONDS if draw.random() < 0.7 else 10 * RUN_SECONDS)
    return Fault(at, kind, machine, other, seconds, disk=kind == "crash" and draw.random() < 0.25)
