"""How a training begins: all processes agree on the data, on what memory allows, and on the checkpoint from which they go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from thinwire import checkpoint
from thinwire.data.open import Data, open_data
from thinwire.link.message import FLAG
from thinwire.link.peer import WorkerId
from thinwire.pipeline import forms
from thinwire.run.budget import attach_budget
from thinwire.run.evaluate import validation_batch
from thinwire.run.folder import summarised, write_folder
from thinwire.run.keeping import Keeper
from thinwire.run.restore import Ballot, restore
from thinwire.run.state import Training

if TYPE_CHECKING:
    from thinwire.memory.blocks import Profile


@dataclass
class Start:
    """What a process was asked to do, and knows from before."""

    resume: bool = False
    """A person asks to go on."""
    recovering: bool = False
    """A worker was lost: go on from the newest checkpoint that all stages have, or from the beginning."""
    data: Data | None = None
    """Of the epoch before: it need not be opened again."""
    validation_BT1: Tensor | None = None
    """Of that data."""
    facts: dict[str, Any] | None = None
    """What checkpoints must know of the run."""
    written: bool = False
    """Whether this process has seen to what belongs into the run folder."""
    profiles: Sequence[Profile] = ()
    """What the memory plans were made from."""
    earlier: checkpoint.Saver | None = None
    """Of the epoch before; it may still be writing."""
    confirmed: int = -1
    """Newest step of which all stages are known to have had a checkpoint."""


def agree(training: Training, start: Start) -> None:
    """Make a training ready, together with all other processes of the run; note in `start` what the next epoch may use."""
    try:
        begin(training, start)
    except BaseException:
        if training.memory is not None:
            training.memory.close()
        raise


def begin(training: Training, start: Start) -> None:
    """Agree on the data, on memory and on the checkpoint; then write what belongs into the run folder."""
    about = agree_on_data(training, start)
    if training.config.memory.budget is None:
        training.compute.bound_in_flight(None)  # other workers may have one
    else:
        training.memory = attach_budget(training, start.profiles)
        start.profiles = training.memory.profiles
    if start.facts is None or start.facts["data"] != about["data"]:
        start.facts = checkpoint.facts(training.config, about["data"])
    kept = (training.compute.stages, start.facts, training.backups, start.confirmed, training.runtime)
    training.keeper = Keeper(training.config, training.folder, *kept)
    if start.earlier is not None:
        start.earlier.close()  # what it has taken is on the disk before anyone votes
    ballot = Ballot(start.resume, start.recovering, about["resume"], start.confirmed, about["summarised"])
    restored, goes_on = restore(training, ballot)
    training.group.gather(True, FLAG)  # no stage writes or deletes before all have taken what they resume from
    if goes_on:
        training.keeper.forget_newer(training.position, restored, must=not start.recovering)
    if not start.written and training.keeper.speaks:
        tokenizer = None if training.data is None else training.data.tokenizer_json
        start.written = write_folder(training.folder, training.config, tokenizer, training.position.step, must=not start.recovering)


def agree_on_data(training: Training, start: Start) -> dict[str, Any]:
    """Open the data where it is needed, on first stages or on all; return what replica 0 tells all others of it."""
    config, group, told = training.config, training.group, None
    if training.has_first or config.data.everywhere:
        start.data = start.data or read_data(training)
        if start.validation_BT1 is None:
            start.validation_BT1 = validation_batch(start.data, config.train.validation_sequences, training.compute.microbatch)
        training.data, training.validation_BT1 = start.data, start.validation_BT1
        told = {"data": start.data.fingerprint, "validation_rows": len(start.validation_BT1), "resume": start.resume}
        told["summarised"] = summarised(training.folder)
    elif not start.recovering:
        training.report({"awaiting": str(WorkerId(group.replica, 0))})
    about = group.announce(told if training.has_first else None, forms.ABOUT_DATA)
    if told is not None and about["data"] != told["data"]:
        who = f"replica {group.replica}" if training.has_first else f"stage {training.compute.stages[0].plan.index}"
        raise ValueError(
            f"{who} reads other data than {'replica' if training.has_first else 'stage'} 0 (fingerprints {told['data']} and "
            f"{about['data']}); give all the same source and tokenizer{'' if training.has_first else ', or leave data.everywhere out'}"
        )
    training.validation_rows = about["validation_rows"]
    return about


def read_data(training: Training) -> Data:
    """Open the data, and tell people how much of it there is."""
    config, train = training.config, training.config.train
    training.report({"reading": f"data.source {config.data.source!r}"})
    data = open_data(config.data, config.model, config.seed, training.report)
    if training.group.replica == 0 and training.has_first and data.train.epoch is not None and data.train.tokens is not None:
        tokens = {"corpus": data.train.tokens, "tokens_per_step": train.batch * config.model.context}
        passes = train.steps * train.batch / data.train.epoch
        training.report({**tokens, "steps": train.steps, "passes": passes, "limited": train.seconds is not None})
    return data
