"""The training loop, on one screen: batch, compute, agree, commit (update, exchange, basis, shared parameters), log, save.

It is the same whether this process computes all stages or one of them among others: `pipeline/protocols.py` says what it needs. How a run
begins is `agree.py`'s job, what is left to do at its end `last.py`'s, which checkpoints are written and stay `keeping.py`'s.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from thinwire.metrics.track import JsonLines, last_loss
from thinwire.optim.optimizers import clip_scale, muon_momentum, rate_factor
from thinwire.pipeline.outcome import EVALUATION, Outcome
from thinwire.pipeline.protocols import Abandoned
from thinwire.run.figures import step_figures
from thinwire.run.last import conclude, end_early, keep_last
from thinwire.run.state import Training
from thinwire.run.telling import refuse_divergence, tell_who_stops


class Trainer(Training):
    """Train, once `agree` has made everything ready."""

    def run(self) -> dict[str, Any]:
        """Train to the end, to the time limit, or until asked to stop; return the summary.

        A run of several processes that is to end at once raises what its links raise: whoever opened them sees to the rest.
        """
        train, stopped = self.config.train, False
        loss = math.nan
        if self.position.step >= train.steps:  # there is no step left to do
            loss = last_loss(self.metrics_path, self.position.step) or math.nan
        try:
            with self.stop.listening(), self.memory or nullcontext(), JsonLines(self.metrics_path, resumed=self.position.step) as metrics:
                while self.position.step < train.steps and not stopped:
                    values, stopped = self.step()
                    loss, done = values["loss"], self.position.step
                    if stopped:
                        tell_who_stops(self)
                    if train.validate_every and done % train.validate_every == 0 and done < train.steps:
                        values["val_loss"] = self.validate()
                    for tracker in (metrics, *self.trackers):
                        tracker.log(done, values)
                    if self.keeper.is_due(done, self.outcome) and done < train.steps and self.together:
                        self.save()
                problems = keep_last(self, stopped)  # before the validation, for which nobody has to wait
                val_loss = self.validate()
                self.doing = "end"
            return conclude(self, loss, val_loss, problems)
        except Abandoned:
            return end_early(self)

    def step(self) -> tuple[dict[str, float], bool]:
        """Do one optimizer step; return what to log, and whether to stop."""
        step, before = self.position.step, self.position.seconds
        self.doing = "step" if step > self.started_at.step + 1 else "first steps"
        first_sample = step * self.config.train.batch + self.group.replica * self.share
        with self.stop.abandoning(self.group.abandon):
            started = self.runtime.now()
            samples = range(step * self.config.train.batch, (step + 1) * self.config.train.batch)
            batch_BT1 = None if self.data is None else torch.from_numpy(self.data.train.batch(first_sample, self.share, samples))
            loss = self.compute.step(batch_BT1, step, first_sample)
            for optimizer in self.replicated:
                self.exchange.gradients({name: tensor.grad for name, tensor in optimizer.named.items() if tensor.grad is not None}, step)
            outcome = self.settle(loss, before + self.runtime.now() - started)
        refuse_divergence(outcome, self.config.train)
        self.keeper.keep(outcome, self.position)
        self.commit(outcome, started)
        return step_figures(self, self.position.seconds - before), outcome.stop

    def settle(self, loss: float | None, seconds: float) -> Outcome:
        """Say what there is to say here of a step whose gradients are all there, after so many seconds of training; return what all say."""
        step, limit, squared = self.position.step, self.config.train.seconds, 0.0
        of_checkpoints = self.keeper.speak(seconds)
        for optimizer in reversed(self.optimizers):  # from the last stage to the first, as across workers
            squared = optimizer.squared_norm() + squared
        timed_out = limit is not None and seconds - self.started_at.seconds >= limit
        stop = self.stop.asked or timed_out
        own = Outcome(step, loss, squared, stop, stopper=self.group.number if stop else -1, timed_out=timed_out, **of_checkpoints)
        self.state = "ready"
        return self.group.settle(own, meeting=self.exchange.meets(step), alike=self.exchange.talks_before(step))

    def commit(self, outcome: Outcome, started: float) -> None:
        """Make the step that all have agreed on part of the run.

        Its outcome has come: every stage has its gradients, so whoever is behind can follow. Weights, what replicas exchange of them,
        basis, shared parameters and position change together; in between the state is `committing`, and nothing of it is ever kept.
        """
        step, train = outcome.step, self.config.train
        self.state, self.outcome = "committing", outcome
        scale, factor, momentum = clip_scale(outcome.norm, train.clip), rate_factor(step, train), muon_momentum(step, train)
        for optimizer in self.optimizers:
            optimizer.step(factor, scale, momentum)
        for optimizer in self.replicated:
            self.exchange.commit()  # what `gradients` has proposed
            waits = self.exchange.talks_after(step)  # on a thin line that takes as long as the step
            with self.stop.abandoning(self.group.abandon) if waits else nullcontext():
                self.exchange.parameters({name: tensor.data for name, tensor in optimizer.named.items()}, optimizer, step)
            self.exchange.commit()
        for optimizer, rotation_KK in zip(self.optimizers, self.compute.update_shared(step, factor), strict=False):
            optimizer.carry_over(rotation_KK)
            self.exchange.carry_over(rotation_KK, optimizer.axes)
        for optimizer in self.optimizers:
            optimizer.average()
        seconds = self.runtime.now() - started
        if self.position == self.started_at:
            self.first_step_seconds = seconds
        self.position = replace(self.position, step=step + 1, seconds=self.position.seconds + seconds)
        self.rate = train.rate * factor
        self.state = "whole"

    def catch_up(self, outcome: Outcome) -> None:
        """Commit a step that others have committed and that this process has its gradients of, where that needs no word from anyone."""
        codec, step = self.compute.codec, self.position.step
        alone = not (codec.moves_after(step) or codec.shares_after(step) or self.exchange.talks_after(step))
        if self.state == "ready" and outcome.step == step and alone:
            self.commit(outcome, self.runtime.now())

    def validate(self) -> float:
        """Return the validation loss, which all processes learn."""
        self.doing = "validation"
        with self.stop.abandoning(self.group.abandon):
            loss = self.compute.evaluate(self.validation_BT1, self.validation_rows, self.position.step)
            agreed = self.group.settle(Outcome(EVALUATION, loss, 0.0)).loss
        assert agreed is not None
        return agreed
