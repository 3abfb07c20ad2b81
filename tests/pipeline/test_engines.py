"""Both engines compute the same bits: codecs, stages, microbatches, depths, mixed pipelines, evaluation, whole trainings, failed steps."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers import random_ids
from jobs import BATCH, EIGHT, TORCH_ENGINE, evaluate_over_links, local_roster, run_config, step_over_links
from runs import VARIETY, train
from thinwire.config.registry import CODECS
from thinwire.model.cut import cut_layers
from thinwire.model.stage import build_stage
from thinwire.pipeline import engine
from thinwire.pipeline.engine_module import EngineModule
from thinwire.pipeline.inprocess import build_codec
from thinwire.pipeline.order import compute_order, fixed_depth
from thinwire.pipeline.own_engine import OwnExecutor
from thinwire.util import device

ENGINES = ("torch", "own", "mixed")
needs_both = pytest.mark.skipif(not TORCH_ENGINE, reason=f"torch {torch.__version__} has another pipeline engine than we know")
DEPTHS = {"one": [1] * 8, "falling": [4, 3, 2, 1, 1, 1, 1, 1], "all": [8] * 8}
"""Microbatches in flight by stage."""
CASES = list(itertools.product(CODECS.names(), (2, 4), (2, 8), DEPTHS))
QUICK = [
    ("dense", 2, 2, "one"),
    ("subspace", 4, 8, "falling"),
    ("anchored", 2, 8, "all"),
    ("topk", 4, 2, "falling"),
    ("quantize", 2, 8, "falling"),
]
MATRIX = [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.full, id="-".join(map(str, case))) for case in CASES]


def engine_of(engines: str, stage: int) -> str:
    return ("own", "torch")[stage % 2] if engines == "mixed" else engines


def configs(config, engines: str) -> list:
    """Give every stage its own settings, of which the engine is one."""
    return [replace(config, pipeline=replace(config.pipeline, engine=engine_of(engines, stage))) for stage in range(config.pipeline.stages)]


def same_bits(found: list[dict], expected: list[dict]) -> bool:
    """Tell whether all workers have the loss and the gradients of all others, to the last bit."""
    assert any(np.abs(gradient).max() > 0 for result in expected for gradient in result["gradients"].values())
    return all(
        mine["loss"] == theirs["loss"]
        and mine["gradients"].keys() == theirs["gradients"].keys()
        and all(mine["gradients"][name].tobytes() == gradient.tobytes() for name, gradient in theirs["gradients"].items())
        for mine, theirs in zip(found, expected, strict=True)
    )


def steps(pool, identities, config, engines: str, in_flight: list[int] | None = None) -> list[dict]:
    ids, roster = random_ids(config.model, BATCH).numpy(), local_roster(identities, config.pipeline.stages)
    arguments = [(each, stage, roster, identities[stage], ids, 2, in_flight) for stage, each in enumerate(configs(config, engines))]
    return pool.run(step_over_links, arguments)


def small(codec: str, stages: int, microbatches: int, dtype: str = "fp32"):
    rank = {"rank": 4} if hasattr(CODECS.load(codec).Options(name=codec), "rank") else {}
    config = run_config(stages, "depth", {"name": codec} | rank, dtype=dtype)
    return replace(config, pipeline=replace(config.pipeline, microbatches=microbatches))


@needs_both
@pytest.mark.parametrize("codec, stages, microbatches, depth", MATRIX)
def test_every_engine_has_the_same_bits(pool, identities, codec, stages, microbatches, depth):
    config = small(codec, stages, microbatches)
    in_flight = [min(microbatches, each) for each in DEPTHS[depth][:stages]]
    first, *others = [steps(pool, identities, config, engines, in_flight) for engines in ENGINES]
    assert all(same_bits(other, first) for other in others)
    again = steps(pool, identities, replace(config, seed=config.seed + 1), "own", in_flight)
    assert not same_bits(again, first)


@needs_both
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "depth"])
@pytest.mark.parametrize("dtype", ["bf16", "fp64"])
def test_every_schedule_with_dropout(pool, identities, schedule, dtype):
    config = run_config(4, schedule, {"name": "subspace", "rank": 4}, replace(EIGHT, dropout=0.3), dtype)
    first, *others = [steps(pool, identities, config, engines) for engines in ENGINES]
    assert all(same_bits(other, first) for other in others)


@needs_both
def test_evaluation_between_steps(pool, identities):
    config = run_config(2, "depth", {"name": "subspace", "rank": 4}, dtype="fp32")
    batches, roster = [random_ids(EIGHT, rows, seed=rows).numpy() for rows in (20, 8, 2)], local_roster(identities, 2)
    first, second = [
        pool.run(
            evaluate_over_links, [(each, stage, roster, identities[stage], batches) for stage, each in enumerate(configs(config, engines))]
        )
        for engines in ("torch", "own")
    ]
    assert [result["losses"] for result in second] == [result["losses"] for result in first]
    assert second[0]["bytes"] == first[0]["bytes"]
    assert same_bits([result | {"loss": None} for result in second], [result | {"loss": None} for result in first])


TRAININGS = VARIETY | {
    "budget": ("--memory.budget", "5MB", "--model.context", "64", "--train.batch", "16", "--pipeline.microbatches", "4"),
    "replicas": ("--replicas.count", "2", "--train.batch", "8"),
    "one microbatch": ("--pipeline.microbatches", "1", "--pipeline.stages", "4"),
}


@needs_both
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "replicas" else pytest.mark.full) for name in TRAININGS],
)
def test_trainings_have_the_same_weights_and_validation(config, tmp_path, name):
    words = (*TRAININGS[name], "--pipeline.mode", "workers", "--train.steps", "4")
    torchs, own = [train(config, tmp_path / engine, *words, "--pipeline.engine", engine) for engine in ("torch", "own")]
    same = ("weights_sha256", "val_loss", "final_loss", "bytes_per_token_forward", "bytes_per_token_backward")
    assert {field: own[field] for field in same} == {field: torchs[field] for field in same}


class Alone:
    """A single stage on our own engine, which notes the shares of the loss that are still held."""

    def __init__(self, depth: int, microbatches: int = 4) -> None:
        config = run_config(1, "depth", {"name": "dense"})
        self.stage = build_stage(config.model, cut_layers(config.model.layers, 1, None), 0, build_codec(config), config.seed)
        self.held: list[weakref.ref] = []
        self.most, self.fails_at = 0, 0
        self.executor = OwnExecutor(
            EngineModule(self.stage, "fp64"), {}, BATCH // microbatches, compute_order(depth, microbatches), self.share
        )

    def share(self, loss: torch.Tensor) -> torch.Tensor:
        share = loss / 4
        self.held.append(weakref.ref(share))
        self.most = max(self.most, sum(each() is not None for each in self.held))
        if len(self.held) == self.fails_at:
            raise ValueError("the link is gone")
        return share

    def run(self, learning: bool = True) -> dict[str, bytes]:
        self.stage.zero_grad(set_to_none=True)
        self.held.clear()
        self.losses = self.executor.run(random_ids(EIGHT, BATCH).int(), torch.arange(BATCH), learning)
        return {name: parameter.grad.numpy().tobytes() for name, parameter in self.stage.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_no_more_microbatches_are_held_than_are_in_flight(depth):
    alone = Alone(depth)
    alone.run()
    assert alone.most == depth and not any(each() is not None for each in alone.held)
    assert len(alone.losses) == 4 and not any(loss.requires_grad for loss in alone.losses)


def test_a_failed_step_leaves_nothing_behind():
    alone, undisturbed = Alone(2), Alone(2)
    alone.fails_at = 4
    with pytest.raises(ValueError, match="the link is gone"):
        alone.run()
    alone.fails_at = 0
    assert alone.run() == undisturbed.run() != {}


def test_an_evaluation_leaves_no_gradient():
    alone = Alone(2)
    with torch.no_grad():
        assert alone.run(learning=False) == {}
    assert len(alone.losses) == 4


def test_depths_of_the_schedules_that_do_not_measure():
    assert [fixed_depth("1f1b", stage, 4, 8) for stage in range(4)] == [7, 5, 3, 1]
    assert fixed_depth("1f1b", 0, 4, 2) == 2 and fixed_depth("gpipe", 3, 4, 8) == 8
    assert fixed_depth("depth", 0, 4, 8) is fixed_depth("auto", 0, 4, 8) is None


def test_a_microbatch_is_timed_with_the_device_at_rest(monkeypatch):
    """A card only takes orders: a clock that is read before it has carried them out shows next to nothing."""
    events, stage = [], Alone(1).stage
    monkeypatch.setattr(engine, "synchronize", lambda device: events.append("rest"))
    monkeypatch.setattr(engine.time, "perf_counter", lambda: events.append("clock") or 0.0)
    assert engine.Engine(stage, {}, {}, 2, 4, "fp64").measure() == 0.0
    assert events == ["rest", "clock"] * 4
    assert all(parameter.grad is None for parameter in stage.parameters())


def test_devices_with_a_queue_are_waited_for(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    for name in ("cpu", "cuda:1", "mps", "xpu"):
        device.synchronize(torch.device(name))
    assert waited == [torch.device(name) for name in ("cuda:1", "mps", "xpu")]
