"""What is asked of exchanges in particular: whether there are replicas, when they meet, and what a reader of their board must know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from thinwire.board.score import Entry, mean
from thinwire.board.subject import CODECS, Subject
from thinwire.codecs.base import LossyOptions
from thinwire.config.sections import RunConfig
from thinwire.replicas.exchange import read_exchange, without_warmup
from thinwire.replicas.graph import make_graph
from thinwire.replicas.peers import Peers

OFF = 1.3
"""Times more, or fewer, bytes in timed steps than in those of learning rows that a reader must know of."""


def refuse_wrong_replicas(config: RunConfig, subject: Subject) -> None:
    """Refuse exchanges without replicas, replicas without exchanges, and steps of two kinds, which cannot be timed as one."""
    count = config.replicas.count
    if subject is CODECS and count > 1:
        raise ValueError(f"replicas.count is {count}, but codecs are compared in one replica; leave it out, or compare --exchange METHODs")
    if subject is CODECS:
        return
    if count == 1:
        raise ValueError("replicas.count is 1, and an exchange takes place between replicas; add --replicas.count 2")
    if isinstance(config.codec, LossyOptions) and config.codec.warmup:
        raise ValueError(
            f"codec.warmup is {config.codec.warmup}: its uncompressed steps would be timed as compressed ones; add --codec.warmup 0"
        )


def meeting_every(config: RunConfig) -> int:
    """Return how many steps go from one meeting of the replicas to the next, or to the end of the run, which is one too."""
    kind, options = read_exchange(without_warmup(config.replicas.exchange)[0])
    asked = kind(options, config, Peers(0, make_graph("complete", 1), {}), {})  # nothing is exchanged: it is only asked
    return next(step + 1 for step in range(config.train.steps) if asked.talks_before(step) or asked.talks_after(step))


def compressed(config: RunConfig) -> RunConfig:
    """Return the settings without first steps in which gradients travel whole."""
    return replace(config, replicas=replace(config.replicas, exchange=without_warmup(config.replicas.exchange)[0]))


def identity(config: RunConfig) -> tuple[RunConfig, Any]:
    """Return what is equal for equal settings, in whichever words an exchange is written."""
    if config.replicas.count == 1:
        return config, None
    return replace(config, replicas=replace(config.replicas, exchange="")), read_exchange(config.replicas.exchange)


def notes(entry: Entry, meeting: int, validate_every: int) -> Iterator[str]:
    """Tell what the figures of an exchange do not show."""
    if validate_every % meeting:
        yield (
            f"`{entry.label}` meets every {meeting} steps and is validated every {validate_every}: "
            "in between this is the mean over replicas that differ."
        )
    if resumed := [row["resumed_at"] for row in entry.learn if row.get("resumed_at")]:
        yield f"`{entry.label}` was interrupted: its bytes are those from step {max(resumed)} on."
    if entry.warmup:
        yield (
            f"`{entry.label}` sends gradients whole in its first {entry.warmup} steps: KB/step has them, s/step does not; in time to loss "
            "each of them counts as one of allreduce."
        )
        return
    timed = mean([turn["bytes_per_step"]["exchange"] for row in entry.speed.values() for turn in row["turns"]])
    learnt = mean([row["bytes_per_step_exchange"] for row in entry.learn])
    if timed and learnt and not 1 / OFF < timed / learnt < OFF:
        yield (
            f"`{entry.label}` exchanged {timed / learnt:.1f} times the bytes of its learning rows in its short timed runs, which begin "
            "and end differently: its times may be off; --end-to-end measures them."
        )
