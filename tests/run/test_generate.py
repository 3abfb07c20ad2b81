"""`thinwire generate` and `thinwire eval` of a finished run: in one process, in workers, on several machines."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from cluster.test_join import loopback
from jobs import command
from runs import train, write_config
from thinwire.cli import main as cli

CODECS = {
    "subspace": ("--codec.dtype", "fp32"),
    "four bits": ("--codec.bits", "4", "--codec.drift_every", "2"),
    "dense": ("--codec.name", "dense"),
    "anchored": ("--codec.name", "anchored", "--codec.ngrams", "2", "--codec.buckets", "64"),
    "threshold": ("--codec.name", "threshold", "--pipeline.engine", "own"),  # of which the workers of an evaluation make use
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, token_cache):
    """Return a function that trains a run once per kind."""
    folder = tmp_path_factory.mktemp("runs")
    config = write_config(folder, token_cache)

    def run(kind: str) -> Path:
        path = folder / kind.replace(" ", "-")
        if not path.exists():
            with redirect_stdout(io.StringIO()):  # what a test reads must not depend on which of them comes first
                train(config, path, "--pipeline.stages", "4", *CODECS[kind])
        return path

    return run


def generate(capsys, run: Path, *words: str) -> str:
    """Call the verb; return what went to standard output."""
    capsys.readouterr()
    assert cli.main(["generate", str(run), *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", CODECS)
def test_workers_write_the_same_text(runs, capsys, kind):
    words = ["--prompt", "12 plus 5", "--max-new-tokens", "30", "--temperature", "0.9", "--top-k", "50", "--seed", "4"]
    alone = generate(capsys, runs(kind), *words)
    assert generate(capsys, runs(kind), *words, "--pipeline.mode", "workers") == alone
    assert len(alone) > 10


def test_seed_and_temperature_matter(runs, capsys):
    run = runs("subspace")
    texts = [generate(capsys, run, "--prompt", "7", "--max-new-tokens", "40", "--seed", seed) for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]
    greedy = [generate(capsys, run, "--prompt", "7", "--temperature", "0", "--seed", seed) for seed in ("1", "2")]
    assert greedy[0] == greedy[1]


def test_standard_output_carries_the_text_alone(runs, capsys):
    assert cli.main(["generate", str(runs("subspace")), "--prompt", "3", "--max-new-tokens", "8", "--temperature", "0"]) == 0
    captured = capsys.readouterr()
    assert "thinwire" not in captured.out and captured.out.endswith("\n")
    assert "8 tokens" in captured.err and "26.0 bytes per new token and boundary" in captured.err  # 6 coordinates in fp32, 2 for the id


def test_an_empty_prompt_begins_a_document(runs, capsys):
    assert generate(capsys, runs("subspace"), "--max-new-tokens", "5").strip()


def test_text_beyond_the_context_is_written_with_a_note(runs, capsys):
    assert cli.main(["generate", str(runs("subspace")), "--prompt", "3", "--max-new-tokens", "20"]) == 0
    assert "the model was trained on 16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-new-tokens", "0"], "max_new_tokens is 0; choose 1 or more"),
        (["--temperature", "-2"], "temperature is -2.0"),
        (["--link.profile", "dsl_2mbps"], "add --pipeline.mode workers"),
        (["--data.tokenizer", "nowhere.json"], "no file nowhere.json"),
    ],
)
def test_wrong_words(runs, capsys, words, message):
    assert cli.main(["generate", str(runs("subspace")), "--prompt", "1", *words]) == 2
    assert message in capsys.readouterr().err


def test_wrong_folders(runs, capsys, tmp_path):
    assert cli.main(["generate", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert cli.main(["generate", str(tmp_path)]) == 2
    assert "is a Hugging Face folder" in capsys.readouterr().err
    shutil.copytree(runs("subspace"), tmp_path / "run")
    (tmp_path / "run/tokenizer.json").unlink()
    assert cli.main(["generate", str(tmp_path / "run")]) == 2
    assert "--data.tokenizer" in capsys.readouterr().err
    for part in (tmp_path / "run/checkpoints").glob("*/stage-2.*"):
        part.unlink()
    assert cli.main(["generate", str(tmp_path / "run"), "--data.tokenizer", str(runs("subspace") / "tokenizer.json")]) == 2
    assert "no complete checkpoint of 4 stages" in capsys.readouterr().err


def test_machines_that_each_have_one_stage(pool, runs, capsys, tmp_path):
    """Each machine holds its own stage's part; only stage 0 has the tokenizer and the prompt."""
    run, words = runs("four bits"), ["--max-new-tokens", "12", "--seed", "5"]
    alone = generate(capsys, run, "--prompt", "5 plus", *words)
    homes = loopback(tmp_path, stages=4)
    jobs = []
    for stage, home in enumerate(homes):
        here = home / "run"
        others = shutil.ignore_patterns(*(f"stage-{other}.*" for other in range(4) if other != stage))
        shutil.copytree(run, here, ignore=others)
        if stage:
            (here / "tokenizer.json").unlink()
        own = ["--roster", str(home / "roster.toml"), "--stage", str(stage), "--keys", str(home / "keys")]
        jobs.append((["generate", str(here), *own, *(["--prompt", "5 plus", *words] if stage == 0 else [])],))
    results = pool.run(command, jobs)
    assert [code for code, _, _ in results] == [0] * 4, results
    assert [out for _, out, _ in results] == [alone, "", "", ""]


@pytest.mark.parametrize("kind", ["four bits", "threshold"])
def test_workers_evaluate_the_same(runs, capsys, kind):
    results, run = [], str(runs(kind))
    for mode in ("inprocess", "workers"):
        capsys.readouterr()
        assert cli.main(["eval", run, "--sequences", "14", "--pipeline.mode", mode]) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0].keys() == {"step", "loss", "perplexity", "bits_per_byte"}
    assert results[1]["loss"] == pytest.approx(results[0]["loss"], rel=1e-12) and results[1]["step"] == 6
    assert results[1]["bits_per_byte"] == pytest.approx(results[0]["bits_per_byte"], rel=1e-12)


def test_eval_reads_another_source(runs, capsys, tmp_path):
    (tmp_path / "other.txt").write_text("Whoever reads this has other words. " * 400)
    run = str(runs("subspace"))
    capsys.readouterr()
    assert cli.main(["eval", run, "--data.source", str(tmp_path / "other.txt"), "--sequences", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["bits_per_byte"] > 0


def test_a_codec_of_whole_sequences_is_refused(config, tmp_path, capsys):
    train(config, tmp_path / "run", "--codec.name", "lowrank", "--codec.rank", "3", "--train.steps", "1")
    assert cli.main(["generate", str(tmp_path / "run")]) == 2
    assert "'lowrank' looks at a whole sequence at once" in capsys.readouterr().err
