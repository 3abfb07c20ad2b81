"""Text that streams by: the windows of the whole, in an order within blocks, at any index, from few blocks in memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thinwire.config.sections import DataConfig, ModelConfig
from thinwire.data.open import open_data
from thinwire.data.shards import write_shard
from thinwire.data.source import FileSource
from thinwire.data.streamed import KEPT, Streamed

MODEL, BUFFER = ModelConfig(vocabulary=300, context=16), 10


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    """Settings of a text of many documents of different lengths."""
    (tmp_path / "text").mkdir()
    for number in range(80):
        (tmp_path / f"text/{number:03}.txt").write_text(
            f"document {number} " + "".join(f"{number * place % 97} " for place in range(number))
        )
    return DataConfig(source=str(tmp_path / "text/*.txt"), cache=str(tmp_path / "cache"), buffer=BUFFER)


def streamed(config: DataConfig, seed: int = 0) -> Streamed:
    train = open_data(config, MODEL, seed).train
    assert isinstance(train, Streamed)
    return train


def windows_of(config: DataConfig) -> list[list[int]]:
    """Return the windows of the text as a whole, in their order."""
    whole: Any = open_data(replace(config, buffer=None), MODEL, 0).train
    return [whole.windows.read(index).tolist() for index in range(len(whole))]


def test_each_block_is_a_permutation_of_the_windows_that_follow_each_other(config):
    windows, train = windows_of(config), streamed(config)
    count = len(windows)
    assert count > 5 * BUFFER and count % BUFFER
    for epoch in range(2):
        found = [train.sample(epoch * count + index).tolist() for index in range(count)]
        assert found != windows
        for start in range(0, count, BUFFER):
            assert sorted(found[start : start + BUFFER]) == sorted(windows[start : start + BUFFER])
    assert found != [train.sample(index).tolist() for index in range(count)]  # each epoch has an order of its own
    assert len(train.blocks) <= KEPT


def test_any_sample_is_the_same_from_anywhere(config, tmp_path):
    train = streamed(config)
    expected = [train.sample(index) for index in range(200)]
    for cache in ("cache", "fresh"):  # with and without the places where blocks begin
        for index in (150, 3, 77, 199, 78, 0):
            one = streamed(replace(config, cache=str(tmp_path / cache)))
            assert np.array_equal(one.sample(index), expected[index])
    assert not np.array_equal(streamed(config, seed=1).sample(0), expected[0]) or BUFFER == 1


def test_going_on_in_the_middle_reads_from_there(config, monkeypatch):
    train = streamed(config)
    expected = train.sample(60)
    asked: list[int] = []
    numbered = FileSource.numbered

    def counted(self, split, first):
        asked.append(first)
        return numbered(self, split, first)

    monkeypatch.setattr(FileSource, "numbered", counted)
    again = streamed(config)
    assert np.array_equal(again.sample(60), expected)
    assert asked[0] == 0 and asked[-1] > 10


def test_damaged_notes_of_places_are_made_again(config, tmp_path):
    expected = [streamed(config).sample(index) for index in (0, 99)]
    (notes,) = (tmp_path / "cache").glob("*.places.json")
    text = notes.read_text()
    for damage in ("", "{", "[]", text.replace('"places": [[0, 0], [', '"places": [[0, 0], [1'), json.dumps({"places": [[0, 0]]})):
        notes.write_text(damage)
        train = streamed(config)
        assert all(np.array_equal(train.sample(index), sample) for index, sample in zip((0, 99), expected, strict=True))


def test_a_limit_ends_the_text(config):
    train = streamed(replace(config, max_tokens=500))
    windows = windows_of(replace(config, max_tokens=500))
    assert sorted(train.sample(index).tolist() for index in range(len(windows))) == sorted(windows)
    assert train.places.windows in (None, len(windows)) and np.array_equal(train.sample(len(windows)), train.sample(len(windows)))
    assert train.places.windows == len(windows) == 31


def test_what_identifies_the_data_knows_the_buffer(config):
    prints = {open_data(each, MODEL, 0).fingerprint for each in (config, replace(config, buffer=11), replace(config, buffer=None))}
    assert len(prints) == 3 and open_data(config, MODEL, 0).fingerprint in prints


def test_what_cannot_be_streamed_is_refused(config, tmp_path):
    write_shard(tmp_path / "c.bin", list(range(200)) * 5)
    with pytest.raises(ValueError, match=r"data.buffer is 10, but the shards .* need none"):
        open_data(replace(config, source=str(tmp_path / "c.bin")), MODEL, 0)
    with pytest.raises(ValueError, match=r"data.buffer 10 is for text"):
        open_data(replace(config, loss="completions"), MODEL, 0)
    with pytest.raises(ValueError, match=r"fewer than 17 tokens found|tokens found, but one sequence needs 17"):
        open_data(replace(config, max_tokens=12), MODEL, 0)
