"""Which checkpoints are there, which is chosen, and which are deleted."""

from __future__ import annotations

import pytest

from checkpoint.support import FACTS, flip, save, trained
from thinwire import checkpoint
from thinwire.checkpoint import Position


def names(run) -> list[str]:
    return [folder.name for folder in checkpoint.steps(run)]


def test_only_the_newest_complete_ones_stay(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert names(tmp_path) == ["step-000002", "step-000003"]


def test_steps_are_ordered_by_number_and_then_by_changes_of_shape(tmp_path):
    there = ["step-1000000", "step-999999", "step-000002", "step-000002-10-00000000", "step-000002-9-ffffffff"]
    for name in (*there, "step-000002.bak", "stepladder", "step-000002-1"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert names(tmp_path) == ["step-000002", "step-000002-9-ffffffff", "step-000002-10-00000000", "step-999999", "step-1000000"]


def test_an_unfinished_checkpoint_is_passed_over(tmp_path):
    save(tmp_path, 1)
    pipeline, _, folder = save(tmp_path, 2)
    (folder / "stage-1.json").unlink()
    assert checkpoint.newest(tmp_path, 2).name == "step-000001"
    plans = [stage.plan for stage in pipeline.stages]
    assert checkpoint.survey(tmp_path).available(plans) == checkpoint.survey(tmp_path).available(plans[1:]) == ["step-000001"]
    assert checkpoint.survey(tmp_path).available(plans[:1]) == ["step-000001", "step-000002"]


def test_a_damaged_one_is_passed_over_where_that_is_asked_for(tmp_path):
    save(tmp_path, 1)
    pipeline, _, folder = save(tmp_path, 2)
    flip(folder / "stage-1.safetensors", -5)
    plans = [stage.plan for stage in pipeline.stages]
    assert checkpoint.survey(tmp_path).available(plans) == ["step-000001", "step-000002"]
    assert checkpoint.survey(tmp_path).available(plans, verify=True) == ["step-000001"]


def test_the_newest_that_every_process_has(tmp_path):
    lists = [["step-000001", "step-000002"], ["step-000002", "step-000002-1-12345678", "step-000003"], ["step-000002", "step-000003"]]
    assert checkpoint.common(tmp_path, lists, 3).name == "step-000002"


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(ValueError, match="holds no complete checkpoint of 2 stages"):
        checkpoint.newest(tmp_path, 2)


def test_the_same_bits_again_leave_the_files_alone(tmp_path):
    _, _, folder = save(tmp_path, 2)
    before = {path.name: path.stat().st_ino for path in folder.iterdir()}
    save(tmp_path, 2)
    assert {path.name: path.stat().st_ino for path in folder.iterdir()} == before
    flip(folder / "stage-0.safetensors", -1)
    save(tmp_path, 2)  # the same bits, but what is there is damaged
    checkpoint.load_stages(folder, trained(0)[0].stages, None, FACTS)


def test_other_bits_of_the_same_step_replace_the_old_ones(tmp_path):
    save(tmp_path, 2, steps=1)
    pipeline, _, folder = save(tmp_path, 2, steps=2)
    again, others = trained(0)
    checkpoint.load_stages(folder, again.stages, others, FACTS)
    assert checkpoint.weights_sha256(again.stages) == checkpoint.weights_sha256(pipeline.stages)


def test_each_stage_deletes_only_its_own_parts(tmp_path):
    pipeline, optimizers = trained(1)
    for step in (1, 2, 3):
        for index in (0, 1):
            if (step, index) != (3, 1):
                folder = checkpoint.save(tmp_path, [pipeline.stages[index]], [optimizers[index]], Position(step, 0.0), FACTS)
    assert names(tmp_path) == ["step-000001", "step-000002", "step-000003"]
    assert sorted(path.name for path in (folder.parent / "step-000001").iterdir()) == ["stage-1.json", "stage-1.safetensors"]


def test_what_a_killed_process_left_goes_with_the_folder(tmp_path):
    _, _, folder = save(tmp_path, 1)
    (folder / ".stage-0.safetensors.1.abc.tmp").write_bytes(b"half")
    (folder / ".stage-1.json.1.abc.tmp").write_bytes(b"half")
    save(tmp_path, 2)
    save(tmp_path, 3)
    assert names(tmp_path) == ["step-000002", "step-000003"]
