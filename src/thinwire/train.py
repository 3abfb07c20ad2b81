"""Train a model: `thinwire train --config laptop --run runs/first`.

The loop is one screen: batch -> pipeline.step -> optimizer -> track -> checkpoint. Settings come from `settings.py`, the stages from
`pipeline/`. A stop (Ctrl-C, SIGTERM, the time limit) ends after the step under way, with a checkpoint.
"""

from __future__ import annotations

import json
import math
import signal
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from thinwire import checkpoint
from thinwire.checkpoint import Position, write_atomic
from thinwire.config import RunConfig
from thinwire.configfile import CONFIG_FILE, shared_hash, to_toml
from thinwire.data.open import Data, open_data
from thinwire.evaluate import TOKENIZER_FILE, validate
from thinwire.optimizer import StageOptimizer, clip_scale, rate_factor
from thinwire.pipeline.device import choose_device, peak_rss_bytes
from thinwire.pipeline.pipeline import Pipeline, build_pipeline
from thinwire.settings import TrainCommand, parse_train
from thinwire.track import JsonLines, Progress


def main(argv: list[str]) -> None:
    """Run the `train` verb."""
    command = parse_train(argv)
    summary = Trainer(command).run()
    print(f"validation loss {summary['val_loss']:.4f} after {summary['steps']} steps; {command.run / 'summary.json'}")


class Stop:
    """Remember that someone asked the run to end."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self, number: int, frame: object) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True

    @contextmanager
    def listening(self):
        """Turn SIGINT and SIGTERM into a wish to stop; a second Ctrl-C stops at once."""
        before = {number: signal.signal(number, self.ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Trainer:
    """Everything one run holds: data, pipeline, optimizers, run folder."""

    def __init__(self, command: TrainCommand) -> None:
        self.config: RunConfig = command.config
        self.folder: Path = command.run
        if self.config.train.threads:
            torch.set_num_threads(self.config.train.threads)
        self.data: Data = open_data(self.config.data, self.config.model, self.config.seed)
        self.pipeline: Pipeline = build_pipeline(self.config, choose_device(self.config.device))
        self.optimizers = [StageOptimizer(stage, self.config.train) for stage in self.pipeline.stages]
        # The number of steps may grow when a run is resumed.
        fixed = replace(self.config, train=replace(self.config.train, steps=0))
        self.facts = {"config": shared_hash(fixed), "data": self.data.fingerprint}
        self.position = Position(step=0, seconds=0.0)
        self.first_step_seconds = 0.0
        if command.resume:
            newest = checkpoint.newest(self.folder, len(self.pipeline.stages))
            self.position = checkpoint.load(newest, self.pipeline.stages, self.optimizers, self.facts)
        self.started_at = self.position
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / CONFIG_FILE, to_toml(self.config).encode())
        if self.data.tokenizer_json is not None:
            write_atomic(self.folder / TOKENIZER_FILE, self.data.tokenizer_json.encode())

    def run(self) -> dict:
        """Train to the end, to the time limit, or until asked to stop; return the summary."""
        train, stop, loss = self.config.train, Stop(), math.nan
        metrics = JsonLines(self.folder / "metrics" / "stage-all.jsonl", resumed=self.position.step)
        with stop.listening(), metrics, Progress(train.steps, self.position.step) as bar:
            while self.position.step < train.steps and not stop.asked and not self._out_of_time():
                values = self.step()
                loss, done = values["loss"], self.position.step
                if train.validate_every and done % train.validate_every == 0 and done < train.steps:
                    values["val_loss"] = self.validate()
                metrics.log(done, values)
                bar.log(done, values)
                if train.checkpoint_every and done % train.checkpoint_every == 0 and done < train.steps:
                    self.save()
            self.save()
        if stop.asked:
            print(f"stopped at step {self.position.step}; go on with: thinwire train --run {self.folder} --resume")
        summary = self.summary(loss, self.validate())
        write_atomic(self.folder / "summary.json", json.dumps(summary, indent=1).encode())
        return summary

    def step(self) -> dict[str, float]:
        """Do one optimizer step; return what to log."""
        train, step = self.config.train, self.position.step
        started = time.perf_counter()
        first_sample = step * train.batch
        batch_BT1 = torch.from_numpy(self.data.train.batch(first_sample, train.batch))
        loss = self.pipeline.step(batch_BT1, step, first_sample)
        norm = math.sqrt(sum(optimizer.squared_norm() for optimizer in self.optimizers))
        if not math.isfinite(norm) or not math.isfinite(loss):
            raise ValueError(
                f"loss {loss} and gradient norm {norm} at step {step}: training has diverged and this step was not applied; "
                f"lower train.rate ({train.rate}) or raise train.warmup ({train.warmup}); the last checkpoint is untouched"
            )
        for optimizer in self.optimizers:
            optimizer.step(rate_factor(step, train), clip_scale(norm, train.clip))
        self._move_basis(step)
        seconds = time.perf_counter() - started
        if self.position == self.started_at:
            self.first_step_seconds = seconds
        self.position = Position(step + 1, self.position.seconds + seconds)
        return {"loss": loss, "gradient_norm": norm, "rate": train.rate * rate_factor(step, train), **self._meters(seconds)}

    def _meters(self, seconds: float) -> dict[str, float]:
        """Return the figures of a step that concern time and traffic."""
        traffic, train = self.pipeline.traffic, self.config.train
        spans = traffic.take_seconds()
        return {
            "seconds": self.position.seconds,
            "tokens": self.position.step * train.batch * self.config.model.context,
            "tokens_per_second": train.batch * self.config.model.context / seconds,
            "bytes_per_token": traffic.per_token("forward") + traffic.per_token("backward"),
            "compute_seconds": seconds - sum(spans.values()),
            **spans,
            "wait_seconds": 0.0,
        }

    def _move_basis(self, step: int) -> None:
        """Let all stages go over to a new basis where the codec wants one now."""
        move = self.pipeline.codec.move(self.pipeline.stages[-1], step)
        if move is not None:
            for stage, optimizer in zip(self.pipeline.stages, self.optimizers, strict=True):
                stage.stream.go_over(move)
                optimizer.carry_over(move.rotation_KK)

    def _out_of_time(self) -> bool:
        limit = self.config.train.seconds
        return limit is not None and self.position.seconds - self.started_at.seconds >= limit

    def validate(self) -> float:
        return validate(self.pipeline, self.data, self.config.train.validation_sequences)

    def save(self) -> None:
        checkpoint.save(self.folder, self.pipeline.stages, self.optimizers, self.position, self.facts)

    def summary(self, loss: float, val_loss: float) -> dict:
        """Describe the finished run (design: `summary.json`)."""
        config, traffic, stages = self.config, self.pipeline.traffic, self.pipeline.stages
        forward, backward = traffic.per_token("forward"), traffic.per_token("backward")
        tokens_per_step = config.train.batch * config.model.context
        steps = self.position.step - self.started_at.step
        timed = self.position.seconds - self.started_at.seconds - self.first_step_seconds
        uncompressed = 2 * config.model.width * {"fp32": 4, "bf16": 2, "fp64": 8}[config.train.dtype]
        return {
            "steps": self.position.step,
            "tokens": self.position.step * tokens_per_step,
            "seconds": self.position.seconds,
            "tokens_per_second": (steps - 1) * tokens_per_step / timed if steps > 1 else None,
            "final_loss": None if math.isnan(loss) else loss,
            "val_loss": val_loss,
            "trainable_parameters": sum(p.numel() for stage in stages for p in stage.parameters()),
            "codec": config.codec.name,
            "stages": len(stages),
            "model_sha256": checkpoint.weights_sha256(stages),
            "weights_sha256": [checkpoint.weights_sha256([stage]) for stage in stages],
            "bytes_per_token_forward": forward,
            "bytes_per_token_backward": backward,
            "bytes_per_token_ids": traffic.per_token("ids"),
            "framed_bytes": None,
            "socket_bytes": None,
            "compression": uncompressed / (forward + backward) if forward else None,
            "link": config.link.profile,
            "peak_rss_bytes": [peak_rss_bytes()],
        }
