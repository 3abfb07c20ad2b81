"""Count how often the code of one warm training step, and of a recovery, crosses from one folder of the package to another.

    .venv/bin/python bench/crossings.py          # stage 0 of two workers; about 10 seconds

A crossing is a call into a function of another folder than the package's function that ran before it, in the main thread of stage 0. A
recovery lasts from the failure of the step in which stage 1 is killed to the first step after it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import thinwire
from thinwire.cluster.launch import train_worker
from thinwire.cluster.supervisor import run_workers
from thinwire.codecs.build import codec_defaults
from thinwire.config.sections import DataConfig, ModelConfig, PipelineConfig, RunConfig, TrainConfig
from thinwire.run.trainer import Trainer

ROOT = str(Path(thinwire.__file__).parent) + os.sep
WARM, KILLED = 4, 6
"""The step that is traced, and the one in which stage 1 is lost."""


class Trace:
    """The folders and modules of the package that calls have led through."""

    def __init__(self) -> None:
        self.crossings, self.modules, self.last = 0, set(), ""

    def __call__(self, frame: Any, event: str, argument: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROOT):
            module = name.removeprefix(ROOT)
            folder = module.partition(os.sep)[0]
            self.crossings += folder != self.last
            self.last = folder
            self.modules.add(module)

    def report(self) -> dict[str, int]:
        return {"folder changes": self.crossings, "modules": len(self.modules)}


def traced(member: Any, say: Callable, stop: Any, report: str, **arguments: Any) -> dict[str, Any]:
    """Be a worker whose warm step and recovery are traced; stage 1 ends itself once."""
    step, recovery, found = Trainer.step, Trace(), {}

    def watched(self: Trainer) -> Any:
        number = self.position.step
        if member.stage == 1 and number == KILLED and not arguments.get("replacing"):
            os._exit(1)
        if member.stage == 1:
            return step(self)
        if number == WARM and "step" not in found:
            warm = Trace()
            sys.setprofile(warm)
            try:
                return step(self)
            finally:
                sys.setprofile(None)
                found["step"] = warm.report()
        if recovery.crossings and "recovery" not in found:
            sys.setprofile(None)
            found["recovery"] = recovery.report()
            Path(report).write_text(json.dumps(found))
        try:
            return step(self)
        except BaseException:
            sys.setprofile(recovery)
            raise

    with mock.patch.object(Trainer, "step", watched):
        return train_worker(member, say, stop, **arguments)


def settings(folder: Path) -> RunConfig:
    """Return a tiny run of two workers."""
    text = folder / "text.txt"
    text.write_text("".join(f"{number} and {number % 7} make {number + number % 7}.\n" for number in range(900)))
    return RunConfig(
        model=ModelConfig(vocabulary=300, width=32, layers=4, heads=4, kv_heads=2, ffn=48, context=16),
        data=DataConfig(source=str(text), cache=str(folder / "cache")),
        train=TrainConfig(steps=8, batch=4, warmup=2, checkpoint_every=2, validation_sequences=4, validate_every=0),
        pipeline=PipelineConfig(stages=2, microbatches=2),
        codec=codec_defaults("subspace", rank=6),
    )


def main() -> None:
    """Trace both and print them."""
    with tempfile.TemporaryDirectory(prefix="thinwire-crossings-") as scratch:
        folder, report = Path(scratch), Path(scratch) / "report.json"
        arguments = {"run": str(folder / "run"), "resume": False, "report": str(report)}
        sys.path.insert(0, str(Path(__file__).parent))
        from crossings import traced as task  # by its importable name: the workers look for it

        run_workers(task, settings(folder), arguments, lambda worker_id, message: None, replacing={"replacing": True})
        for name, counts in json.loads(report.read_text()).items():
            print(f"{name}: {', '.join(f'{value} {what}' for what, value in counts.items())}")


if __name__ == "__main__":
    main()
