"""Train a model: `thinwire train --config laptop --run runs/first`.

The loop is one screen: batch -> pipeline.step -> optimizer -> track -> checkpoint. It is the same whether the pipeline holds all stages
(`pipeline/pipeline.py`) or one of them in a worker process (`pipeline/worker.py`). A stop (Ctrl-C, SIGTERM, the time limit) ends the run
after the step under way, with a checkpoint.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from thinwire import checkpoint
from thinwire.checkpoint import Position
from thinwire.config import RunConfig
from thinwire.configfile import CONFIG_FILE, to_toml
from thinwire.data.open import Data, open_data
from thinwire.evaluate import validation_batch
from thinwire.farewell import farewell, go_on_command, last_words
from thinwire.files import write_atomic
from thinwire.inputs import check_inputs
from thinwire.last import settle_last
from thinwire.link.message import FLAG, optional
from thinwire.link.roster import Place
from thinwire.news import Report, ignore, tell
from thinwire.optimizer import StageOptimizer, clip_scale, rate_factor
from thinwire.pipeline import forms
from thinwire.pipeline.device import choose_device, peak_rss_bytes
from thinwire.pipeline.outcome import Outcome, of_replica
from thinwire.pipeline.pipeline import Pipeline, build_pipeline
from thinwire.pipeline.worker import WorkerPipeline
from thinwire.progress import Progress
from thinwire.replicas import exchange
from thinwire.saved import TOKENIZER_FILE
from thinwire.settings import TrainCommand, parse_train
from thinwire.stop import Abandoned, Stop
from thinwire.summary import summarise
from thinwire.track import JsonLines, Tracker
from thinwire.trackers.registry import open_trackers


def main(argv: list[str]) -> None:
    """Run the `train` verb."""
    command = parse_train(argv)
    config = command.config
    check_inputs(config, command.run)
    go_on = go_on_command("train", command.run)
    with farewell(command.run, go_on):
        if config.pipeline.mode == "workers":
            from thinwire.launch import launch  # not at the top: it starts processes

            summary = launch(command)
        else:
            summary = train_here(command)
    if summary["val_loss"] is not None:
        print(f"validation loss {summary['val_loss']:.4f} after {summary['steps']} steps; {command.run / 'summary.json'}")
    if summary["steps"] < config.train.steps:
        print(last_words(summary, command.run, go_on))


def train_here(command: TrainCommand) -> dict:
    """Train all stages in this process; return the run's summary."""
    config, stop = command.config, Stop()
    with open_trackers(command.track, command.run, config, resume=command.resume) as curves, Progress.of(config) as progress:

        def report(event: dict[str, Any]) -> None:
            if text := tell(event):
                progress.say(text)

        stop.tell = progress.say
        pipeline = build_pipeline(config, choose_device(config.device))
        shown = [progress, *curves]
        trainer = Trainer(config, command.run, pipeline, resume=command.resume, trackers=shown, stop=stop, report=report)
        try:
            return trainer.run()
        except Abandoned:
            return trainer.end_early()


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
        earlier: checkpoint.Saver | None = None,
        confirmed: int = -1,
        trackers: Sequence[Tracker] = (),
        stop: Stop | None = None,
        report: Report = ignore,
    ) -> None:
        """Get everything ready; `trackers` are shown each step, beside the metrics file, and closed by whoever made them.

        `recovering` goes on from the newest checkpoint that all stages have, or from the beginning; `data` need not be opened again then.
        `earlier` may still be writing; `confirmed` is a step of which all stages are known to have had a checkpoint. `report` takes
        what people should know besides.
        """
        self.config, self.folder, self.pipeline, self.trackers = config, folder, pipeline, trackers
        self.report = report
        if config.train.threads:
            torch.set_num_threads(config.train.threads)
        self.first, self.last = pipeline.stages[0].plan.first, pipeline.stages[-1].plan.last
        about = self._agree_on_data(data, resume, quiet=recovering)
        pipeline.manage_memory(config, folder)
        self.optimizers = [StageOptimizer(stage, config.train) for stage in pipeline.stages]
        pipeline.memory.adopt(self.optimizers)
        trained = {name: tensor for optimizer in self.optimizers for name, tensor in optimizer.named.items()}
        self.exchange = exchange.build(config, pipeline.peers, trained)
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
        indices = [stage.plan.index for stage in pipeline.stages]
        self.saver = checkpoint.Saver(folder, indices, self.facts, alone=config.replicas.count == 1)
        self.confirmed, self.offered = confirmed, -1
        self.kept: tuple[int, ...] = ()
        """Steps whose checkpoints were last said to stay."""
        if earlier is not None:
            earlier.close()  # what it has taken is on the disk before anyone votes
        self.problem: str | None = None
        self._restore(resume, recovering, about["resume"])
        self.started_at = self.position
        self.saved = self.position.step // max(1, config.train.checkpoint_every)
        """Periods of `checkpoint_every` that a checkpoint was taken for."""
        self.pipeline.gather_values(True, FLAG)  # no stage writes before all have taken what they resume from
        self._write_folder()

    def _restore(self, resume: bool, recovering: bool, first_resumes: bool) -> None:
        """Vote with all stages for the newest checkpoint that each of them, or a neighbour for it, has; load it."""
        # After a loss a damaged one is passed over; where a person asks for it, it is refused by name.
        mine = checkpoint.available(self.folder, [stage.plan for stage in self.pipeline.stages], verify=recovering)
        votes = self.pipeline.gather_values(
            {"steps": mine, "copies": self.pipeline.held_copies(), "recovering": recovering, "confirmed": self.confirmed}, forms.VOTE
        )
        anyone = any(vote["recovering"] for vote in votes)
        if first_resumes != resume and not anyone:
            here, there = ("with", "without") if resume else ("without", "with")
            raise ValueError(f"this stage was started {here} --resume, stage 0 {there} it; start all stages alike")
        copies = [held_for(worker, votes, self.pipeline.stages[0].plan.count) for worker in range(len(votes))]
        lists = [{*vote["steps"], *held} for vote, held in zip(votes, copies, strict=True)]
        unwritten = max(vote["confirmed"] for vote in votes) < 0 and not set.intersection(*lists)
        if not (resume or anyone) or (anyone and not resume and unwritten):
            return  # a new run; or one of which no checkpoint was whole yet, and all begin again
        newest = checkpoint.common(self.folder, lists, self.pipeline.stages[0].plan.count)
        self.pipeline.fetch_copies(newest.name, votes)
        self.position = checkpoint.load(newest, self.pipeline.stages, self.optimizers, self.facts, self.exchange.load_state)
        self.confirmed = max(self.confirmed, self.position.step)
        self.pipeline.offer(newest.name)
        if self.position.step >= self.config.train.steps and not anyone:
            raise ValueError(f"{self.folder} is finished at step {self.position.step}; to go on give a larger --train.steps")

    def _agree_on_data(self, data: Data | None, resume: bool, *, quiet: bool) -> dict:
        """Open the data where it is needed, on first stages; return what replica 0 tells all others of it."""
        config = self.config
        self.data = (data or self._read_data()) if self.first else None
        told = None
        if self.data is not None:
            self.validation = validation_batch(self.data, config.train.validation_sequences, self.pipeline.microbatch)
            told = {"data": self.data.fingerprint, "validation_rows": len(self.validation), "resume": resume}
        elif not quiet:
            self.report({"awaiting": str(Place(self.pipeline.replica, 0))})
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

    def _write_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        files = {CONFIG_FILE: to_toml(self.config)}
        if self.data is not None and self.data.tokenizer_json is not None:
            files[TOKENIZER_FILE] = self.data.tokenizer_json
        for name, text in files.items():
            path = self.folder / name
            if not path.is_file() or path.read_bytes() != text.encode():  # a full disk is no reason to fail where nothing changes
                write_atomic(path, text.encode())

    def _metrics(self) -> JsonLines:
        """Open this process's metrics file."""
        label = "all" if self.first and self.last else str(self.pipeline.stages[0].plan.index)
        return JsonLines(self.folder / "metrics" / f"stage-{label}.jsonl", resumed=self.position.step)

    def run(self) -> dict:
        """Train to the end, to the time limit, or until asked to stop; return the summary.

        Raise Abandoned, or from links Stopping, when the run is to end at once: `end_early` then does what is left to do.
        """
        train, loss = self.config.train, math.nan
        with self.stop.listening(), self.pipeline.memory, self._metrics() as metrics:
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
                if train.checkpoint_every and done // train.checkpoint_every > self.saved and done < train.steps and self.together:
                    self.save()
            self.save()
            self.saver.flush()  # before the validation, for which nobody has to wait
            if stopped:
                self.pipeline.gather_values(True, FLAG)  # every stage has written its part
                self.report({"kept": self.position.step, "folder": str(self.saver.place(self.position.step))})
            val_loss = self.validate()
            self.doing = "end"
        summary = self.summary(loss, val_loss)
        if self.first and self.pipeline.replica == 0:
            write_atomic(self.folder / "summary.json", json.dumps(summary, indent=1).encode())
        settle_last(self)
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
            saved = self.saver.written
            who = self.pipeline.number if stop else -1
            own = Outcome(step, loss, squared, stop, saved=saved, copied=self.pipeline.copied(saved), stopper=who, timed_out=timed_out)
            outcome = self.pipeline.settle(own, meeting=self.exchange.meets(step), alike=self.exchange.talks_before(step))
        self._refuse_divergence(outcome)
        self.ready, self.outcome = False, outcome
        self.keep(outcome)
        self.torn = True
        self._update(outcome)
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
            place = Place(*divmod(outcome.stopper, self.config.pipeline.stages))
            who = "" if outcome.stopper == self.pipeline.number else str(place)
            self.report({"stopped_by": who, "time_limit": outcome.timed_out, "after": self.position.step})

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
            self.saver.flush()
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
        """Take a snapshot; it is written while training goes on, or with a memory budget at once: it needs no copy then."""
        before, self.doing = self.doing, "checkpoint"
        at_once = self.config.memory.budget is not None
        self.saved = self.position.step // self.config.train.checkpoint_every if self.config.train.checkpoint_every else 0
        self.saver.save(self.pipeline.stages, self.optimizers, self.position, self.exchange.state, at_once=at_once)
        for optimizer in self.optimizers if at_once else ():
            optimizer.put_away()  # a validation may come next
        self.doing = before

    def keep(self, outcome: Outcome) -> None:
        """Keep the newest two checkpoints that everyone has, and those that copies are of; offer the next copy; say what went wrong.

        All stages decide by the same outcome: on a slow line a copy may take longer than the time between checkpoints, and copies of
        different steps would be worth nothing. So two more may stay: the newest of which every keeper has a copy, the only one that
        survives the loss of a machine, and the one whose copies are under way.
        """
        safe, newest = max(outcome.copied, default=-1), max(outcome.saved, default=-1)
        if safe > self.confirmed:
            self.confirmed = safe
            self.pipeline.confirm(safe)
        if newest > self.offered and self.offered in (-1, *outcome.copied):
            self.offered = newest
            self.pipeline.offer(checkpoint.folder_of(self.folder, replace(self.position, step=newest), self.facts).name)
        needed = (*sorted(outcome.saved)[-2:], self.confirmed, self.offered)
        if outcome.saved and needed != self.kept:
            self.kept = needed
            self.saver.confirm(newest, needed)
        problem = self.saver.problem
        if problem != self.problem:
            self.problem = problem
            if problem is not None:
                print(f"thinwire: warning: {problem}", file=sys.stderr, flush=True)

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
        meters, memories = self.pipeline.traffic.boundaries, self.pipeline.memory.peaks(self.optimizers)
        own = [
            {
                "hashes": checkpoint.tensor_hashes([stage]),
                "parameters": sum(parameter.numel() for parameter in stage.parameters())
                - sum(copy.weight.numel() for copy in stage.copies()),
                "boundary": meters[index].counts() if index < len(meters) else None,
                "links": self.pipeline.link_meters(),
                "exchange": self.pipeline.peers.sent,
                "memory": memories[index],
            }
            for index, stage in enumerate(self.pipeline.stages)
        ]
        return summarise(
            self.config, run, self.pipeline.gather(own, forms.PART), self.pipeline.gather_values(peak_rss_bytes(), optional(forms.COUNT))
        )


def held_for(worker: int, votes: list[dict], stages: int) -> list[str]:
    """List the checkpoints of a worker of which another stage of its replica has a copy."""
    replica, stage = divmod(worker, stages)
    return [name for vote in of_replica(votes, replica, stages) for name in vote["copies"].get(str(stage), [])]
