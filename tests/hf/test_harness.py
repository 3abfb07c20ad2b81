"""Handing the exported model to the LM Evaluation Harness: for real where it is installed, with a clear refusal where it is not."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from runs import train
from thinwire.cli import main as cli
from thinwire.hf.harness import run_tasks


def test_a_missing_harness_is_named_with_the_fix(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("thinwire.hf.harness.find_spec", lambda name: None)
    train(config, tmp_path / "run", "--train.steps", "1")
    assert cli.main(["eval", str(tmp_path / "run"), "--tasks", "lambada_openai"]) == 2
    assert "pip install -c constraints.txt 'lm_eval[hf]'" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm_eval is not installed")
def test_the_harness_measures_the_exported_model(config, tmp_path):
    train(config, tmp_path / "run", "--train.steps", "1")
    (tmp_path / "test.jsonl").write_text("\n".join(json.dumps({"text": f"{number} plus 3 is"}) for number in range(4)))
    task = {
        "task": "local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "test.jsonl")}},
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    results = run_tasks(tmp_path / "run", [task], None, "cpu")  # type: ignore[list-item]
    assert 0 < results["local"]["bits_per_byte,none"] < 20
