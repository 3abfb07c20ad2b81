"""Where a run goes on: all workers vote for the newest checkpoint that each of them, or a neighbour for it, has; or begin together.

Everyone sees the same votes, so everyone decides alike. Reading the checkpoint is `checkpoint/`'s job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire import checkpoint
from thinwire.pipeline import forms
from thinwire.run.folder import summarised
from thinwire.run.state import Training
from thinwire.util.notices import note


@dataclass(frozen=True)
class Ballot:
    """What this worker was asked to do, and knows, when all vote."""

    resume: bool
    """A person asks to go on."""
    recovering: bool
    """A worker was lost: go on from the newest checkpoint that all have, or from the beginning."""
    first_resumes: bool
    """Whether stage 0 was asked to go on."""
    confirmed: int
    """A step of which all stages are known to have had a checkpoint; -1: none."""
    summarised: int
    """The step up to which the run's summary was written, as stage 0 knows it; -1: none was."""


def restore(training: Training, ballot: Ballot) -> tuple[Path | None, bool]:
    """Load the checkpoint that all choose; refuse a run whose summary of its last step is written too.

    Return that checkpoint, None for the beginning, and whether a run goes on.
    """
    newest, anyone = choose(training, ballot)
    if newest is not None:
        stages, load_state = training.compute.stages, training.exchange.load_state
        training.position = checkpoint.load_stages(newest, stages, training.optimizers, training.keeper.facts, load_state)
    training.started_at = training.position
    training.keeper.begin(training.position, newest)
    if training.config.train.steps <= training.position.step <= ballot.summarised and not anyone:
        raise ValueError(f"{training.folder} is finished at step {training.position.step}; to go on give a larger --train.steps")
    return newest, ballot.resume or anyone


def choose(training: Training, ballot: Ballot) -> tuple[Path | None, bool]:
    """Vote; return the checkpoint to go on from, None for the beginning, and whether anyone recovers from a loss."""
    folder, keeper, plans = training.folder, training.keeper, [stage.plan for stage in training.compute.stages]
    # After a loss a damaged one is passed over; where a person asks for it, it is refused by name.
    copies, confirmed, found = keeper.held(), max(ballot.confirmed, summarised(folder)), checkpoint.survey(folder)
    mine, confirmed = found.available(plans, verify=ballot.recovering), max(confirmed, found.proven())
    vote = {"steps": mine, "copies": copies, "recovering": ballot.recovering, "confirmed": confirmed}
    votes = training.group.gather(vote, forms.VOTE)
    anyone = any(vote["recovering"] for vote in votes)
    if ballot.first_resumes != ballot.resume and not anyone:
        here, there = ("with", "without") if ballot.resume else ("without", "with")
        raise ValueError(f"this stage was started {here} --resume, stage 0 {there} it; start all stages alike")
    if not (ballot.resume or anyone):
        return None, False
    lists = [{*vote["steps"], *held} for vote, held in zip(votes, held_for_each(votes, plans[0].count), strict=True)]
    if not set.intersection(*lists) and max(vote["confirmed"] for vote in votes) < 0:
        if ballot.resume and keeper.speaks:
            text = f"no checkpoint of {folder} was written by all stages before they ended: training begins again at step 0"
            note(text)
        return None, anyone
    newest = checkpoint.common(folder, lists, plans[0].count)
    if keeper.backups is not None or newest.name not in mine:
        keeper.fetch(newest.name, mine, votes)
    return newest, anyone


def held_for_each(votes: Sequence[dict[str, Any]], stages: int) -> list[list[str]]:
    """List for each worker the checkpoints of which another stage of its replica has a copy."""
    found = []
    for worker in range(len(votes)):
        first = worker - worker % stages  # that of its replica
        found.append([name for vote in votes[first : first + stages] for name in vote["copies"].get(str(worker - first), [])])
    return found
