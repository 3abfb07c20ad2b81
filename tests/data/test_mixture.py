"""Several sources with weights: the grammar, shares that are exact, and every sample by its index alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from thinwire.config.sections import DataConfig, ModelConfig
from thinwire.data.batches import Samples
from thinwire.data.mixture import MixedWindows, Mixture, shares
from thinwire.data.open import open_data, source_files
from thinwire.data.shards import write_shard
from thinwire.data.weights import parse_mixture
from thinwire.run.check import absolute_sources

MODEL = ModelConfig(vocabulary=300, context=16)


class Numbered(Samples):
    """Samples that say where they come from."""

    def __init__(self, name: int, epoch: int) -> None:
        self.name, self.epoch, self.tokens = name, epoch, epoch * 10

    def sample(self, index: int) -> np.ndarray:
        return np.array([self.name, index])


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("a.txt:2,b/*.txt:1", [("a.txt", 2), ("b/*.txt", 1)]),
        ("hf:some/name:en:0.5, stdlib:1.5", [("hf:some/name:en", Fraction(1, 2)), ("stdlib", Fraction(3, 2))]),
        ("stdlib", [("stdlib", 1)]),
        ("hf:some/name:config", [("hf:some/name:config", 1)]),
        ("odd,name.txt", [("odd,name.txt", 1)]),
        ("only.txt:2", [("only.txt:2", 1)]),
    ],
)
def test_sources_and_weights(source, parts):
    assert parse_mixture(source) == parts


@pytest.mark.parametrize("source", ["a.txt:2,b.txt", "a.txt:2,b.txt:0", "a.txt:2,b.txt:-1", "a.txt:2,", ":1,a.txt:1", "a.txt:1,b.txt:1e3"])
def test_a_source_without_a_weight_among_others_is_refused(source):
    with pytest.raises(ValueError, match="has no weight above 0"):
        parse_mixture(source)


def test_a_file_of_that_name_stays_one_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a:2,b:1").write_text("x")
    assert parse_mixture("a:2,b:1") == [("a:2,b:1", 1)]


def test_paths_of_a_mixture_are_written_down_from_the_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute_sources("a.txt:2,hf:some/name:1.5,stdlib:1") == f"{tmp_path}/a.txt:2,hf:some/name:1.5,stdlib:1"
    assert absolute_sources("a.txt:0.00001,stdlib:30") == f"{tmp_path}/a.txt:0.00001,stdlib:30"
    assert absolute_sources("a,b.txt") == f"{tmp_path}/a,b.txt"


def test_shares_are_exact_where_a_round_can_be():
    assert shares([Fraction(2), Fraction(1)]) == [42, 21]
    assert shares([Fraction("0.5"), Fraction("0.125"), Fraction("0.375")]) == [32, 8, 24]
    assert shares([Fraction(1), Fraction(99_999)])[0] == 1
    rounded = shares([Fraction("0.33333"), Fraction("0.66667")])
    assert abs(rounded[0] / sum(rounded) - 1 / 3) < 1e-3


def test_every_sample_of_each_source_comes_once_and_in_its_share():
    mixture = Mixture([Numbered(0, 1000), Numbered(1, 50)], [Fraction(3), Fraction(1)], seed=4)
    found = [tuple(mixture.sample(index)) for index in range(640)]
    for name, count in ((0, 480), (1, 160)):
        assert sorted(index for who, index in found if who == name) == list(range(count))
    assert Counter(who for who, _ in found[:64]) == {0: 48, 1: 16}
    assert found == [tuple(mixture.sample(index)) for index in reversed(range(640))][::-1]
    assert found != [tuple(Mixture(mixture.parts, [Fraction(3), Fraction(1)], seed=5).sample(index)) for index in range(640)]
    assert mixture.epoch == 200 and mixture.tokens == 10500


def write_sources(folder: Path) -> DataConfig:
    (folder / "a.txt").write_text("apples and pears, one of each\n" * 400)
    (folder / "b.txt").write_text("0123456789 9876543210 5555\n" * 900)
    return DataConfig(source=f"{folder}/a.txt:2,{folder}/b.txt:1", cache=str(folder / "cache"))


def test_a_mixture_of_texts_has_one_tokenizer_and_both_texts(tmp_path):
    config = write_sources(tmp_path)
    data = open_data(config, MODEL, 0)
    assert data.tokenizer is not None and isinstance(data.validation, MixedWindows)
    texts = [data.tokenizer.decode(window[:-1].tolist()) for window in data.train.batch(0, 63)]
    assert sum("a" in text for text in texts) == 42
    shown = [data.tokenizer.decode(window.tolist()) for window in data.validation.evenly(9)]
    assert sum("a" in text for text in shown) == 6 and len(shown) == 9
    again = open_data(config, MODEL, 0)
    assert np.array_equal(again.train.batch(7, 90), data.train.batch(0, 97)[7:]) and again.fingerprint == data.fingerprint
    other = open_data(replace(config, source=config.source.replace(":2", ":3")), MODEL, 0)
    assert other.fingerprint != data.fingerprint and other.tokenizer_json == data.tokenizer_json
    assert {path.name for path in source_files(config)} == {"a.txt", "b.txt"}


def test_shards_in_a_mixture_need_a_tokenizer(tmp_path):
    config = write_sources(tmp_path)
    write_shard(tmp_path / "c.bin", list(range(200)) * 5)
    mixed = replace(config, source=f"{config.source},{tmp_path}/c.bin:1")
    with pytest.raises(ValueError, match=r"c.bin holds tokens need one tokenizer for all: set --data.tokenizer"):
        open_data(mixed, MODEL, 0)
    data = open_data(config, MODEL, 0)
    assert data.tokenizer is not None
    data.tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert open_data(replace(mixed, tokenizer=str(tmp_path / "tokenizer.json")), MODEL, 0).train.batch(0, 4).shape == (4, 17)
