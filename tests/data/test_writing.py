"""`thinwire data`: shards that train as their text does, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thinwire.cli import main as cli
from thinwire.config.sections import DataConfig, ModelConfig
from thinwire.data.open import open_data
from thinwire.data.shards import open_shard, write_shard

MODEL = ModelConfig(vocabulary=300, context=16)


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / f"text/{number}.txt").write_text(f"document {number} of some words " * (number + 1))
    return str(tmp_path / "text/*.txt")


def test_shards_hold_the_tokens_of_the_text(text, tmp_path, capsys):
    words = ["--vocabulary", "300", "--shard-tokens", "1000", "--cache", str(tmp_path / "cache")]
    assert cli.main(["data", text, str(tmp_path / "out"), *words]) == 0
    assert "training and" in capsys.readouterr().out
    shards = sorted(path.name for path in (tmp_path / "out").glob("train-*.bin"))
    assert len(shards) > 2 and len(open_shard(tmp_path / "out" / shards[0])) == 1000
    plain: Any = open_data(DataConfig(source=text, cache=str(tmp_path / "cache")), MODEL, 0)
    source, tokenizer = str(tmp_path / "out/*.bin"), str(tmp_path / "out/tokenizer.json")
    written: Any = open_data(DataConfig(source=source, tokenizer=tokenizer), MODEL, 0)
    assert np.array_equal(written.train.batch(0, 99), plain.train.batch(0, 99))
    assert np.array_equal(written.validation.evenly(5), plain.validation.evenly(5))
    assert written.tokenizer_json == plain.tokenizer_json


def test_ids_above_two_bytes_make_wide_shards(tmp_path):
    write_shard(tmp_path / "a.bin", [1, 70_000, 2])
    assert open_shard(tmp_path / "a.bin").tolist() == [1, 70_000, 2]
    assert (tmp_path / "a.bin").stat().st_size == 1024 + 12


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{text}", "{folder}/text"], "exists and is not overwritten"),
        (["{folder}/none.txt", "{folder}/out"], "matches no file"),
        (["{text}", "{folder}/out", "--shard-tokens", "0"], "choose 1 or more for --shard-tokens"),
        (["{text}", "{folder}/out", "--vocabulary", "9"], "model.vocabulary is 9"),
        (["{text}:1,stdlib:2", "{folder}/out"], "are several sources"),
        (["{folder}/a.bin", "{folder}/out"], "is a token shard already"),
        (["{folder}/text/1.txt", "{folder}/text/2.txt", "{folder}/out"], "takes a source and a folder, and was given 3 words"),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_nothing(text, tmp_path, capsys, words, message):
    write_shard(tmp_path / "a.bin", [1, 2])
    before = sorted(tmp_path.iterdir())
    given = [word.format(text=text, folder=tmp_path) for word in words]
    assert cli.main(["data", *given, "--cache", str(tmp_path / "text")]) == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
