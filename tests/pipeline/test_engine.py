"""Workers compute what the in-process pipeline computes: every schedule, both backends, 2 to 8 processes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from helpers import gradients, random_ids
from jobs import (
    BATCH,
    CPU,
    EIGHT,
    FIRST_SAMPLE,
    TORCH_ENGINE,
    evaluate_over_links,
    local_roster,
    run_config,
    step_over_gloo,
    step_over_links,
)
from thinwire.pipeline.inprocess import Pipeline, build_pipeline

CODECS = {
    "subspace": {"name": "subspace", "rank": 4},
    "four bits": {"name": "subspace", "rank": 4, "bits": 4},
    "dense": {"name": "dense"},
    "entropy": {"name": "subspace", "rank": 4, "entropy": True, "rate": 2.0},
}
WORKERS, SCHEDULES = (2, 4, 8), ("gpipe", "1f1b", "depth")
QUICK = {
    (2, "gpipe", "subspace"),
    (2, "depth", "four bits"),
    (4, "1f1b", "dense"),
    (4, "depth", "subspace"),
    (2, "1f1b", "entropy"),
}
"""The cases of `make test`: each schedule, each codec, two numbers of workers."""
MATRIX = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.full, id="-".join(map(str, case)))
    for case in itertools.product(WORKERS, SCHEDULES, CODECS)
]


def in_process(config, ids_BT1, steps: int = 1) -> tuple[float, Pipeline]:
    pipeline = build_pipeline(config, CPU)
    for step in range(steps):
        loss = pipeline.step(ids_BT1, step, FIRST_SAMPLE)
    return loss, pipeline


def joined(results: list[dict]) -> dict[str, np.ndarray]:
    return {name: gradient for result in results for name, gradient in result["gradients"].items()}


def assert_near(found: dict[str, np.ndarray], pipeline: Pipeline) -> None:
    """Compare with the oracle; a parameter whose gradient is zero there must have a zero gradient here."""
    expected = {name: gradient.numpy() for name, gradient in gradients(pipeline).items()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert np.linalg.norm(found[name] - gradient) <= 1e-10 * np.linalg.norm(gradient), name
    assert sum(np.linalg.norm(gradient) for gradient in expected.values()) > 0


@pytest.mark.parametrize("workers, schedule, codec", MATRIX)
def test_same_numbers(pool, identities, tmp_path, workers, schedule, codec):
    config = run_config(workers, schedule, CODECS[codec])
    ids = random_ids(EIGHT, BATCH)
    loss, pipeline = in_process(config, ids, steps=2)
    roster = local_roster(identities, workers)
    links = pool.run(step_over_links, [(config, stage, roster, identities[stage], ids.numpy(), 2) for stage in range(workers)])
    gloo = links  # on which our own engine does not run
    if TORCH_ENGINE:
        gloo = pool.run(step_over_gloo, [(config, stage, str(tmp_path / "store"), ids.numpy(), 2) for stage in range(workers)])
    for results in (links, gloo):
        assert [result["mode"] for result in results] == ["STATIC"] * workers
        assert [result["loss"] for result in results[:-1]] == [None] * (workers - 1)
        assert results[-1]["loss"] == pytest.approx(loss, rel=1e-10, abs=0)
        assert_near(joined(results), pipeline)
    over_links, over_gloo = joined(links), joined(gloo)
    assert links[-1]["loss"] == gloo[-1]["loss"]
    assert all(gradient.tobytes() == over_gloo[name].tobytes() for name, gradient in over_links.items())


@pytest.mark.parametrize("changes", [{"dropout": 0.3}, {"vocabulary": 70_000}], ids=["dropout", "ids wider than 16 bits"])
def test_other_models(pool, identities, changes):
    """Dropout is drawn alike in every cut; ids of a large vocabulary cross the boundaries whole."""
    model = replace(EIGHT, **changes)
    config = run_config(4, "depth", CODECS["subspace"], model)
    ids = random_ids(model, BATCH)
    loss, pipeline = in_process(config, ids)
    without, _ = in_process(replace(config, model=EIGHT), ids % EIGHT.vocabulary)
    assert loss != without
    roster = local_roster(identities, 4)
    results = pool.run(step_over_links, [(config, stage, roster, identities[stage], ids.numpy()) for stage in range(4)])
    assert results[-1]["loss"] == pytest.approx(loss, rel=1e-10, abs=0)
    assert_near(joined(results), pipeline)


@pytest.mark.parametrize("codec, schedule", [("subspace", "gpipe"), ("four bits", "1f1b"), ("subspace", "depth")])
def test_evaluation_between_steps(pool, identities, codec, schedule):
    """20 rows are two and a half batches of 8, 2 a quarter of one: the engine fills them up and leaves the filling out."""
    config = run_config(2, schedule, CODECS[codec])
    batches = [random_ids(EIGHT, rows, seed=rows) for rows in (20, 8, 2)]
    pipeline = build_pipeline(config, CPU)
    expected = []
    for number, batch_BT1 in enumerate(batches):
        expected.append(pipeline.evaluate(batch_BT1, len(batch_BT1)))
        pipeline.step(batches[1], number, FIRST_SAMPLE)
    roster, arrays = local_roster(identities, 2), [batch.numpy() for batch in batches]
    results = pool.run(evaluate_over_links, [(config, stage, roster, identities[stage], arrays) for stage in range(2)])
    for result in results:
        assert result["losses"] == pytest.approx(expected, rel=1e-10, abs=0)
    assert_near(joined(results), pipeline)
    assert results[0]["bytes"] == [boundary.meter.counts() for boundary in pipeline.boundaries]
