"""The figures of a run: what is logged of a step, and each process's part of the summary."""

from __future__ import annotations

import math
from typing import Any

from thinwire import checkpoint
from thinwire.link.message import optional
from thinwire.metrics.summary import summarise
from thinwire.model.stage import Stage
from thinwire.optim.optimizers import StageOptimizer
from thinwire.pipeline import forms
from thinwire.run.state import Training
from thinwire.util.device import peak_rss_bytes


def step_figures(training: Training, seconds: float) -> dict[str, float]:
    """Return what to log of the step that was just committed, and took so long."""
    outcome, position = training.outcome, training.position
    tokens = training.config.train.batch * training.config.model.context
    assert outcome is not None and outcome.loss is not None
    return {
        "loss": outcome.loss,
        "gradient_norm": outcome.norm,
        "rate": training.rate,
        "seconds": position.seconds,
        "tokens": position.step * tokens,
        "tokens_per_second": tokens / seconds,
        **training.compute.figures(seconds),
        **training.exchange.take_figures(),
    }


def summary(training: Training, loss: float, val_loss: float) -> dict[str, Any]:
    """Describe the finished run; every stage adds its own part."""
    position, started, config = training.position, training.started_at, training.config
    steps, timed = position.step - started.step, position.seconds - started.seconds - training.first_step_seconds
    tokens_per_step = config.train.batch * config.model.context
    run = {
        "steps": position.step,
        "tokens": position.step * tokens_per_step,
        "seconds": position.seconds,
        "tokens_per_second": (steps - 1) * tokens_per_step / timed if steps > 1 else None,
        "final_loss": None if math.isnan(loss) else loss,
        "val_loss": val_loss,
        "timed_steps": steps,
    }
    parts = [part for process in training.group.gather(stage_parts(training), forms.PARTS) for part in process]
    return summarise(config, run, parts, training.group.gather(peak_rss_bytes(), optional(forms.COUNT)))


def stage_parts(training: Training) -> list[dict[str, Any]]:
    """Return what each stage of this process has to say of itself."""
    stages = training.compute.stages
    memories = map(held_bytes, stages, training.optimizers) if training.memory is None else training.memory.peaks()
    return [
        {
            "hashes": checkpoint.tensor_hashes([stage]),
            "parameters": sum(each.numel() for name, each in stage.named_parameters() if name not in stage.frozen)
            - sum(copy.weight.numel() for copy in stage.copies()),
            "memory": memory,
            **totals,
        }
        for stage, memory, totals in zip(stages, memories, training.compute.totals(), strict=True)
    ]


def held_bytes(stage: Stage, optimizer: StageOptimizer) -> dict[str, int] | None:
    """Return what a stage with an adapter holds during the whole of a step; nobody counts for others that have no budget."""
    if not stage.frozen:
        return None
    trained = sum(parameter.nbytes for parameter in optimizer.named.values())
    frozen = sum(each.nbytes for name, each in stage.named_parameters() if name in stage.frozen)
    return {"base": frozen, "parameters": trained, "gradients": trained, "optimizer": sum(map(sum, optimizer.state_sizes()))}
