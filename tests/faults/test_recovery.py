"""The oracle of every fault: the weights of each stage are SHA-256 equal to those of an undisturbed run."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from faults.inject import POINTS, Fault, train_with
from runs import train, write_config

pytestmark = pytest.mark.timeout(180)
STAGES = 4
WORDS = ("--pipeline.stages", str(STAGES), "--train.steps", "12", "--train.checkpoint_every", "3", "--train.threads", "1")
LATER = {"forward": 9, "backward": 9, "optimizer": 5, "write": 2}
"""How often a stage has passed a point when it is struck: in the middle of the run, between two checkpoints."""
VARIETY = {
    "four bits and drift": ("--codec.bits", "4", "--codec.drift_every", "2", "--codec.drift_rate", "0.5", "--model.dropout", "0.1"),
    "threshold": ("--codec.name", "threshold", "--codec.lifespan", "3"),
    "learned projector": ("--codec.name", "anchored", "--codec.rank", "6", "--codec.projector", "learned", "--codec.projector_every", "2"),
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory, token_cache) -> str:
    return write_config(tmp_path_factory.mktemp("faults"), token_cache)


@pytest.fixture(scope="module")
def quiet(settings):
    """Return a function that gives the hashes of an undisturbed run, in one process."""
    known: dict[tuple[str, ...], list[str]] = {}

    def hashes(*words: str) -> list[str]:
        if words not in known:
            known[words] = train(settings, Path(settings).with_name(f"quiet-{len(known)}"), *WORDS, *words)["weights_sha256"]
        return known[words]

    return hashes


def run_with(settings: str, folder: Path, faults: list[Fault], *words: str) -> tuple[list[str], list[dict]]:
    """Train through faults; return the hashes, and what stage 0 said of its recoveries. Every fault must have struck."""
    heard: list[tuple[int, dict]] = []
    command = ["--config", settings, "--run", str(folder / "run"), *WORDS, *words]
    summary = train_with(command, faults, folder / "struck", heard)
    assert len(list((folder / "struck").iterdir())) == len(faults), "a fault did not strike"
    lines = (folder / "run/metrics/stage-0.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 13))
    return summary["weights_sha256"], [message for stage, message in heard if stage == 0 and "restored" in message]


@pytest.mark.parametrize(("point", "stage"), [("forward", 2), ("backward", 1), ("optimizer", 0), ("write", 3)])
def test_a_killed_stage_changes_no_bit(settings, quiet, tmp_path, point, stage):
    hashes, restored = run_with(settings, tmp_path, [Fault(stage, point, LATER[point])])
    assert hashes == quiet()
    assert len(restored) >= 1


@pytest.mark.full
@pytest.mark.parametrize("stage", range(STAGES))
@pytest.mark.parametrize("point", POINTS)
def test_every_stage_at_every_point(settings, quiet, tmp_path, point, stage):
    if (point, stage) == ("backward", 0):
        pytest.skip("the first stage sends no gradient")
    assert run_with(settings, tmp_path, [Fault(stage, point, LATER[point])])[0] == quiet()


@pytest.mark.parametrize("stages", [(1, 2), range(STAGES)], ids=["two neighbours", "all"])
def test_several_at_once(settings, quiet, tmp_path, stages):
    assert run_with(settings, tmp_path, [Fault(stage, "forward", 9) for stage in stages])[0] == quiet()


def test_a_stage_that_is_lost_before_its_first_checkpoint(settings, quiet, tmp_path):
    hashes, restored = run_with(settings, tmp_path, [Fault(1, "forward", 2)])
    assert hashes == quiet() and restored[-1]["restored"] == 0


@pytest.mark.full
@pytest.mark.parametrize("kind", VARIETY)
def test_codecs_with_state(settings, quiet, tmp_path, kind):
    faults = [Fault(2, "forward", 11), Fault(0, "optimizer", 7)]
    assert run_with(settings, tmp_path, faults, *VARIETY[kind])[0] == quiet(*VARIETY[kind])


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_same_stage_twenty_times(settings, quiet, tmp_path):
    """Killed twenty times at random points of its life."""
    generator = random.Random(5)
    faults = [Fault(2, generator.choice(POINTS[:3]), number) for number in generator.sample(range(1, 24), 20)]
    chosen = {(fault.point, fault.number): fault for fault in faults}
    assert run_with(settings, tmp_path, list(chosen.values()))[0] == quiet()


def test_a_frozen_stage_is_replaced(settings, quiet, tmp_path):
    words = ("--link.silent_seconds", "3")
    assert run_with(settings, tmp_path, [Fault(1, "forward", 9, "freeze")], *words)[0] == quiet()
