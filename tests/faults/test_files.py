"""Damaged checkpoints and full disks."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from faults.inject import Fault, flip_file
from faults.support import STAGES, WORDS, restored, resumed, run_with
from runs import train
from thinwire.checkpoint import steps
from thinwire.cli import main as cli


def test_a_damaged_checkpoint_is_passed_over(settings, quiet, tmp_path):
    """A worker dies and its newest checkpoint has another bit: all go back to the one before it."""
    hashes, heard = run_with(settings, tmp_path, [Fault(2, "forward", 17, "flip file")])
    assert hashes == quiet()
    assert restored(heard)[-1] == 3


def test_a_full_disk_does_not_stop_the_run(settings, quiet, tmp_path):
    """Two checkpoints of a stage are not written; then a neighbour dies: all go back to one that is whole."""
    faults = [Fault(1, "forward", 5, "full", 2.0), Fault(2, "forward", 17, "kill")]
    hashes, heard = run_with(settings, tmp_path, faults)
    assert hashes == quiet()
    assert restored(heard)[-1] == 0
    assert len([message for _, message in heard if "lost" in message]) == 1


@pytest.fixture(scope="module")
def finished(settings, tmp_path_factory) -> Path:
    """A run of four stages in one process, with its last two checkpoints."""
    run = tmp_path_factory.mktemp("finished") / "run"
    train(settings, run, *WORDS)
    return run


@pytest.mark.full
@pytest.mark.parametrize("ending", ["safetensors", "json"])
@pytest.mark.parametrize("seed", range(8))
def test_any_bit_of_a_checkpoint(settings, quiet, finished, tmp_path, capsys, ending, seed):
    """Any bit of any file of the newest checkpoint: refused by name, passed over, or of no consequence; never other weights."""
    generator = random.Random(seed)
    run = shutil.copytree(finished, tmp_path / "run")
    newest = steps(run)[-1]
    flip_file(newest / f"stage-{generator.randrange(STAGES)}.{ending}", generator)
    code = cli.main(["train", "--config", settings, "--run", str(run), "--resume", *WORDS])
    error = capsys.readouterr().err
    if code == 0:  # begun again at the one before
        assert json.loads((run / "summary.json").read_text())["weights_sha256"] == quiet()
        return
    assert code == 2 and "Traceback" not in error and (str(newest) in error or "is finished at step 12" in error), error
    shutil.rmtree(newest)
    assert resumed(settings, run) == quiet()
