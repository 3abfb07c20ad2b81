"""What people are told of a training while it runs: why it stops, where the last step is kept, that it diverges."""

from __future__ import annotations

import math

from thinwire.config.sections import TrainConfig
from thinwire.link.peer import WorkerId
from thinwire.pipeline.outcome import Outcome
from thinwire.run.state import Training


def refuse_divergence(outcome: Outcome, train: TrainConfig) -> None:
    """Raise ValueError for a step that must not be committed."""
    if outcome.loss is None or not math.isfinite(outcome.loss) or not 0 <= outcome.squared_norm < math.inf:
        raise ValueError(
            f"loss {outcome.loss} and gradient norm {outcome.norm} at step {outcome.step}: training has diverged and this step was not "
            f"applied; lower train.rate ({train.rate}) or raise train.warmup ({train.warmup}); the last checkpoint is untouched"
        )


def tell_who_stops(training: Training) -> None:
    """Say whose wish it is that the run ends, unless the person at this machine knows."""
    outcome = training.outcome
    assert outcome is not None
    if outcome.timed_out or not training.stop.asked:
        worker = WorkerId(*divmod(outcome.stopper, training.config.pipeline.stages))
        who = "" if outcome.stopper == training.group.number else str(worker)
        training.report({"stopped_by": who, "time_limit": outcome.timed_out, "after": training.position.step})


def tell_what_is_kept(training: Training) -> None:
    """Say where the last step is, and that nobody has to wait for the validation."""
    assert training.outcome is not None
    # A supervisor's workers end for no other reason than its person's wish, or the time limit.
    pressed = training.stop.asked or (training.stop.supervised and not training.outcome.timed_out)
    step = training.position.step
    training.report({"kept": step, "folder": str(training.keeper.saver.place(step)), "pressed": pressed})
