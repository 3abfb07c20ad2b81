"""The training loop, on one screen: batch -> pipeline.step -> optimizer -> track -> checkpoint.

It is the same whether the pipeline holds all stages (`pipeline/inprocess.py`) or one of them in a worker process (`pipeline/worker.py`).
Where a run goes on is `restore.py`'s job, which checkpoints are written and stay `keeping.py`'s, the verb `cli/train.py`'s. A stop (Ctrl-C,
SIGTERM, the time limit) ends the run after the step under way, with a checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from thinwire import checkpoint
from thinwire.checkpoint import Position
from thinwire.config.sections import RunConfig
from thinwire.data.open import Data, open_data
from thinwire.link.message import FLAG, TEXT, optional
from thinwire.link.peer import WorkerId
from thinwire.metrics.news import Report, ignore
from thinwire.metrics.summary import summarise
from thinwire.metrics.track import JsonLines, Tracker
from thinwire.optim.optimizers import StageOptimizer, clip_scale, rate_factor
from thinwire.pipeline import forms
from thinwire.pipeline.device import peak_rss_bytes
from thinwire.pipeline.inprocess import Pipeline
from thinwire.pipeline.outcome import Outcome
from thinwire.pipeline.worker import WorkerPipeline
from thinwire.replicas import exchange
from thinwire.run.budget import attach_budget
from thinwire.run.evaluate import validation_batch
from thinwire.run.folder import summarised, write_folder, write_summary
from thinwire.run.keeping import Keeper
from thinwire.run.last import settle_last
from thinwire.run.restore import Ballot, choose, last_loss, speaks
from thinwire.run.stop import Stop
from thinwire.util.disk import warn
from thinwire.util.shown import shown

if TYPE_CHECKING:
    from thinwire.memory.blocks import Profile


class Trainer:
    """Everything one process of a run holds: data (with stage 0), pipeline, optimizers, run folder."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        pipeline: Pipeline | WorkerPipeline,
        *,
        resume: bool = False,
        recovering: bool = False,
        data: Data | None = None,
        profiles: Sequence[Profile] = (),
        earlier: checkpoint.Saver | None = None,
        confirmed: int = -1,
        trackers: Sequence[Tracker] = (),
        stop: Stop | None = None,
        report: Report = ignore,
    ) -> None:
        """Get everything ready; `trackers` are shown each step, beside the metrics file, and closed by whoever made them.

        `recovering` goes on from the newest checkpoint that all stages have, or from the beginning; `data` need not be opened
        again then, nor the stages measured of which there are `profiles`.
        `earlier` may still be writing; `confirmed` is a step of which all stages are known to have had a checkpoint. `report` takes
        what people should know besides.
        """
        self.config, self.folder, self.pipeline, self.trackers = config, folder, pipeline, trackers
        self.report = report
        if config.train.threads:
            torch.set_num_threads(config.train.threads)
        self.first, self.last = pipeline.stages[0].plan.first, pipeline.stages[-1].plan.last
        about = self._agree_on_data(data, resume, quiet=recovering)
        self.optimizers = [StageOptimizer(stage, config.train) for stage in pipeline.stages]
        self.memory = attach_budget(pipeline, self.optimizers, config, folder, profiles)
        trained = {name: tensor for optimizer in self.optimizers for name, tensor in optimizer.named.items()}
        self.exchange = exchange.make_exchange(config, pipeline.peers, trained)
        self.facts = checkpoint.facts(config, about["data"])
        self.position = Position(step=0, seconds=0.0)
        self.first_step_seconds = 0.0
        self.doing = "start"
        """What this process is about, for whoever watches whether it gets on."""
        self.stop = stop or Stop()
        self.ready = False
        """Whether all gradients of the step under way are there."""
        self.torn = False
        """Whether the weights are those of a step that is only partly committed: basis or shared parameters are still to follow."""
        self.outcome: Outcome | None = None
        """Outcome of the last step that was committed."""
        self.keeper = Keeper(config, folder, pipeline, self.facts, confirmed)
        if earlier is not None:
            earlier.close()  # what it has taken is on the disk before anyone votes
        restored, goes_on = self._restore(Ballot(resume, recovering, about["resume"], confirmed), about["summarised"])
        self.started_at = self.position
        self.pipeline.gather_values(True, FLAG)  # no stage writes or deletes before all have taken what they resume from
        if goes_on:
            self.keeper.forget_newer(self.position, restored, must=not recovering)
        tokenizer = None if self.data is None else self.data.tokenizer_json
        if speaks(pipeline):
            write_folder(folder, config, tokenizer, self.position.step, must=not recovering)

    def _restore(self, ballot: Ballot, written: int) -> tuple[Path | None, bool]:
        """Load the checkpoint that all choose; refuse a run whose summary of the last step is `written` too.

        Return that checkpoint, None for the beginning, and whether a run goes on.
        """
        newest, anyone = choose(self.folder, self.pipeline, ballot)
        if newest is not None:
            self.position = checkpoint.load_stages(newest, self.pipeline.stages, self.optimizers, self.facts, self.exchange.load_state)
        self.keeper.begin(self.position, newest)
        if self.config.train.steps <= self.position.step <= written and not anyone:
            raise ValueError(f"{self.folder} is finished at step {self.position.step}; to go on give a larger --train.steps")
        return newest, ballot.resume or anyone

    def _agree_on_data(self, data: Data | None, resume: bool, *, quiet: bool) -> dict:
        """Open the data where it is needed, on first stages; return what replica 0 tells all others of it."""
        config = self.config
        self.data = (data or self._read_data()) if self.first else None
        told = None
        if self.data is not None:
            self.validation = validation_batch(self.data, config.train.validation_sequences, self.pipeline.microbatch)
            told = {"data": self.data.fingerprint, "validation_rows": len(self.validation), "resume": resume}
            told["summarised"] = summarised(self.folder)
        elif not quiet:
            self.report({"awaiting": str(WorkerId(self.pipeline.replica, 0))})
        about = self.pipeline.announce(told, forms.ABOUT_DATA)
        if self.data is not None and about["data"] != self.data.fingerprint:
            raise ValueError(
                f"replica {self.pipeline.replica} reads other data than replica 0 (fingerprints {self.data.fingerprint} and "
                f"{about['data']}); give all replicas the same source and tokenizer"
            )
        self.validation_rows: int = about["validation_rows"]
        return about

    def _read_data(self) -> Data:
        """Open the data, and tell people how much of it there is."""
        config = self.config
        self.report({"reading": f"data.source {config.data.source!r}"})
        data = open_data(config.data, config.model, config.seed, self.report)
        if self.pipeline.replica == 0:
            train, passes = config.train, config.train.steps * config.train.batch / len(data.train)
            tokens = {"corpus": len(data.train.windows.stream), "tokens_per_step": train.batch * config.model.context}
            self.report({**tokens, "steps": train.steps, "passes": passes, "limited": train.seconds is not None})
        return data

    def _metrics(self) -> JsonLines:
        """Open this process's metrics file."""
        return JsonLines(self._metrics_path, resumed=self.position.step)

    @property
    def _metrics_path(self) -> Path:
        label = "all" if self.first and self.last else str(self.pipeline.stages[0].plan.index)
        return self.folder / "metrics" / f"stage-{label}.jsonl"

    def run(self) -> dict:
        """Train to the end, to the time limit, or until asked to stop; return the summary.

        Raise Abandoned, or from links Stopping, when the run is to end at once: `end_early` then does what is left to do.
        """
        train = self.config.train
        loss = last_loss(self._metrics_path, self.position.step) or math.nan  # if there is no step left to do
        with self.stop.listening(), self.memory or nullcontext(), self._metrics() as metrics:
            stopped = False
            while self.position.step < train.steps and not stopped:
                values, stopped = self.step()
                loss, done = values["loss"], self.position.step
                if stopped:
                    self._tell_who_stops()
                if train.validate_every and done % train.validate_every == 0 and done < train.steps:
                    values["val_loss"] = self.validate()
                for tracker in (metrics, *self.trackers):
                    tracker.log(done, values)
                if self.keeper.is_due(done, self.outcome) and done < train.steps and self.together:
                    self.save()
            self.save()
            problem = self.keeper.finish()  # before the validation, for which nobody has to wait
            problems = self.pipeline.gather_values(problem, optional(TEXT))
            if stopped and not any(problems):
                self._tell_what_is_kept()
            val_loss = self.validate()
            self.doing = "end"
        summary = self.summary(loss, val_loss)
        if self.first and self.pipeline.replica == 0 and not any(problems):
            write_summary(self.folder, summary)
        if not any(problems):
            settle_last(self)
        if problem is not None:
            raise ValueError(problem)
        for other in filter(None, problems if self.pipeline.copies is not None else ()):
            warn(f"another machine says: {shown(other, 500)}. Until then the last step of this run is not whole")
        return summary

    def step(self) -> tuple[dict[str, float], bool]:
        """Do one optimizer step; return what to log, and whether to stop."""
        train, step = self.config.train, self.position.step
        self.doing = "step" if step > self.started_at.step + 1 else "first steps"
        self._forget_waits()
        started = time.perf_counter()
        share = self.config.replica_batch
        first_sample = step * train.batch + self.pipeline.replica * share
        batch_BT1 = None if self.data is None else torch.from_numpy(self.data.train.batch(first_sample, share))
        with self.stop.abandoning(self.pipeline.abandon):
            loss = self.pipeline.step(batch_BT1, step, first_sample)
            self._exchange_gradients(step)
            squared = 0.0
            for optimizer in reversed(self.optimizers):  # from the last stage to the first, as across workers
                squared = optimizer.squared_norm() + squared
            timed_out = self._out_of_time(time.perf_counter() - started)
            stop = self.stop.asked or timed_out
            self.ready = True
            saved, late = self.keeper.saver.written, self.keeper.wants_first(self.position.seconds + time.perf_counter() - started)
            copied, uncopied = self.pipeline.copied(saved), self.pipeline.uncopied()
            who = self.pipeline.number if stop else -1
            own = Outcome(
                step, loss, squared, stop, saved=saved, copied=copied, uncopied=uncopied, save=late, stopper=who, timed_out=timed_out
            )
            outcome = self.pipeline.settle(own, meeting=self.exchange.meets(step), alike=self.exchange.talks_before(step))
        self._refuse_divergence(outcome)
        self.ready, self.outcome = False, outcome
        self.keeper.keep(outcome, self.position)
        self.torn = True
        self._update(outcome)
        if self.pipeline.peers.count > 1:  # else nothing is waited for, and the step is whole in a moment
            with self.stop.abandoning(self.pipeline.abandon):  # on a thin line it takes as long as the step
                self._exchange_parameters(step)
        if self.pipeline.codec.moves_after(step):
            self._move_basis()
        self._update_shared(step)
        seconds = time.perf_counter() - started
        if self.position == self.started_at:
            self.first_step_seconds = seconds
        self.position = replace(self.position, step=step + 1, seconds=self.position.seconds + seconds)
        self.torn = False
        assert outcome.loss is not None
        values = {"loss": outcome.loss, "gradient_norm": outcome.norm, "rate": train.rate * rate_factor(step, train)}
        return values | self._meters(seconds), outcome.stop

    def _tell_who_stops(self) -> None:
        """Say whose wish it is that the run ends, unless the person at this machine knows."""
        outcome = self.outcome
        assert outcome is not None
        if outcome.timed_out or not self.stop.asked:
            worker_id = WorkerId(*divmod(outcome.stopper, self.config.pipeline.stages))
            who = "" if outcome.stopper == self.pipeline.number else str(worker_id)
            self.report({"stopped_by": who, "time_limit": outcome.timed_out, "after": self.position.step})

    def _tell_what_is_kept(self) -> None:
        """Say where the last step is, and that nobody has to wait for the validation."""
        assert self.outcome is not None
        # A supervisor's workers end for no other reason than its person's wish, or the time limit.
        pressed = self.stop.asked or (self.stop.supervised and not self.outcome.timed_out)
        step = self.position.step
        self.report({"kept": step, "folder": str(self.keeper.saver.place(step)), "pressed": pressed})

    def _forget_waits(self) -> None:
        """Begin to count anew: what start-up or a validation has sent and waited for is not the next step's."""
        self.pipeline.waits.take_seconds()
        self.pipeline.peers.take_wait()
        self.pipeline.peers.take_sent()

    def _update(self, outcome: Outcome) -> None:
        train = self.config.train
        for optimizer in self.optimizers:
            optimizer.step(rate_factor(outcome.step, train), clip_scale(outcome.norm, train.clip))
        self.exchange.commit()

    def _exchange_gradients(self, step: int) -> None:
        """Let replicas learn from each other's gradients."""
        if self.pipeline.peers.count > 1:
            (optimizer,) = self.optimizers
            self.exchange.gradients({name: tensor.grad for name, tensor in optimizer.named.items() if tensor.grad is not None}, step)

    def _exchange_parameters(self, step: int) -> None:
        """Let replicas learn from each other's parameters."""
        if self.pipeline.peers.count > 1:
            (optimizer,) = self.optimizers
            self.exchange.parameters({name: tensor.data for name, tensor in optimizer.named.items()}, optimizer, step)
            self.exchange.commit()

    def catch_up(self, outcome: Outcome) -> None:
        """Apply a step that others have committed and that this stage has its gradients of, where that needs no word from anyone."""
        codec, step = self.pipeline.codec, self.position.step
        alone = not (codec.moves_after(step) or codec.shares_after(step) or self.exchange.talks_after(step))
        if self.ready and not self.torn and outcome.step == step and alone:
            self._update(outcome)
            self._exchange_parameters(step)  # which talks to nobody at this step
            self.ready, self.position = False, replace(self.position, step=step + 1)

    def end_early(self) -> dict:
        """Write the last committed step; return a summary without figures that would take time."""
        self.doing = "end"
        if not self.torn and self.together:  # otherwise the last checkpoint stands
            self.save()
            if problem := self.keeper.finish():
                warn(problem)
        return {"steps": self.position.step, "val_loss": None}

    def _refuse_divergence(self, outcome: Outcome) -> None:
        if outcome.loss is None or not math.isfinite(outcome.norm) or not math.isfinite(outcome.loss):
            train = self.config.train
            raise ValueError(
                f"loss {outcome.loss} and gradient norm {outcome.norm} at step {outcome.step}: training has diverged and this step was not "
                f"applied; lower train.rate ({train.rate}) or raise train.warmup ({train.warmup}); the last checkpoint is untouched"
            )

    def _meters(self, seconds: float) -> dict[str, float]:
        """Return the figures of a step that concern time and traffic."""
        traffic, train = self.pipeline.seen, self.config.train
        spans, peers = self.pipeline.waits.take_seconds(), self.pipeline.peers
        spans["wait_seconds"] += peers.take_wait()
        return {
            "seconds": self.position.seconds,
            "tokens": self.position.step * train.batch * self.config.model.context,
            "tokens_per_second": train.batch * self.config.model.context / seconds,
            "bytes_per_token": traffic.per_token("forward") + traffic.per_token("backward"),
            "compute_seconds": seconds - sum(spans.values()),
            **spans,
            **{name: value for stage in self.pipeline.stages for name, value in stage.figures().items()},
            **({"exchange_bytes": peers.take_sent()} if peers.count > 1 else {}),
            **{f"exchange_{name}": value for name, value in self.exchange.take_figures().items()},
            **self.pipeline.link_figures(seconds),
        }

    def _move_basis(self) -> None:
        """Let all stages go over to a new basis."""
        basis_DK = self.pipeline.next_basis()
        for stage, optimizer in zip(self.pipeline.stages, self.optimizers, strict=True):
            rotation_KK = stage.stream.go_over(basis_DK, stage.stream.version + 1)
            optimizer.carry_over(rotation_KK)
            self.exchange.carry_over(rotation_KK, optimizer.axes)

    def _update_shared(self, step: int) -> None:
        """Let both sides of every boundary update what they share; the gradients of other steps are dropped."""
        if self.pipeline.codec.shares_after(step):
            self.pipeline.update_shared(rate_factor(step, self.config.train))
        for stage in self.pipeline.stages:
            for shared in (*stage.owned(), *stage.copies()):
                shared.weight.grad = None

    def _out_of_time(self, step_seconds: float) -> bool:
        limit = self.config.train.seconds
        return limit is not None and self.position.seconds + step_seconds - self.started_at.seconds >= limit

    def validate(self) -> float:
        self.doing = "validation"
        with self.stop.abandoning(self.pipeline.abandon):
            return self.pipeline.evaluate(self.validation if self.first else None, self.validation_rows, self.position.step)

    @property
    def together(self) -> bool:
        """Tell whether the replicas have just met: between meetings they differ, and are not at the same step."""
        return self.position.step == 0 or self.exchange.meets(self.position.step - 1)

    def save(self) -> None:
        """Take a snapshot."""
        before, self.doing = self.doing, "checkpoint"
        self.keeper.save(self.optimizers, self.position, self.exchange.state)
        self.doing = before

    def summary(self, loss: float, val_loss: float) -> dict:
        """Describe the finished run; every stage adds its own part."""
        steps = self.position.step - self.started_at.step
        timed = self.position.seconds - self.started_at.seconds - self.first_step_seconds
        tokens_per_step = self.config.train.batch * self.config.model.context
        run = {
            "steps": self.position.step,
            "tokens": self.position.step * tokens_per_step,
            "seconds": self.position.seconds,
            "tokens_per_second": (steps - 1) * tokens_per_step / timed if steps > 1 else None,
            "final_loss": None if math.isnan(loss) else loss,
            "val_loss": val_loss,
            "timed_steps": steps,
        }
        meters, memories = self.pipeline.traffic.boundaries, self.memory and self.memory.peaks()
        own = [
            {
                "hashes": checkpoint.tensor_hashes([stage]),
                "parameters": sum(parameter.numel() for parameter in stage.parameters())
                - sum(copy.weight.numel() for copy in stage.copies()),
                "boundary": meters[index].counts() if index < len(meters) else None,
                "links": self.pipeline.link_meters(),
                "exchange": self.pipeline.peers.sent,
                "memory": memories and memories[index],
            }
            for index, stage in enumerate(self.pipeline.stages)
        ]
        return summarise(
            self.config, run, self.pipeline.gather(own, forms.PART), self.pipeline.gather_values(peak_rss_bytes(), optional(forms.COUNT))
        )
