"""The whole way from a source to batches, and the cache on it."""

from __future__ import annotations

import dataclasses
import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from patience import HANG
from thinwire.config.sections import DataConfig, ModelConfig
from thinwire.data.open import Data, open_data

MODEL = ModelConfig(vocabulary=300, context=16)


def write_text(path: Path, words: int = 3000) -> DataConfig:
    """Write text of random numbers and return the settings that read it."""
    generator = np.random.default_rng(0)
    path.write_text("".join(f"{word}\n" if word % 7 == 0 else f"word {word} größe " for word in generator.integers(1000, size=words)))
    return DataConfig(source=str(path), cache=str(path.parent / "cache"))


def everything(data: Data) -> tuple[object, ...]:
    """Return what must be the same on each run."""
    return data.fingerprint, data.tokenizer_json, data.bytes_per_token, data.train.batch(0, 20).tolist(), data.validation.evenly(5).tolist()


def open_in_process(config: DataConfig, queue: multiprocessing.Queue) -> None:
    queue.put(everything(open_data(config, MODEL, 0)))


def test_text_comes_back_from_the_tokens(tmp_path: Path) -> None:
    config = write_text(tmp_path / "a.txt")
    data = open_data(config, MODEL, 0)
    assert data.tokenizer is not None
    parts = []
    for stream in (data.train.windows.stream, data.validation.stream):
        parts.append(data.tokenizer.decode(stream.read(0, len(stream)).tolist()))
    assert "".join(parts) == (tmp_path / "a.txt").read_text()
    assert data.bytes_per_token == len(parts[1].encode()) / len(data.validation.stream)
    assert data.train.sample(0).shape == (17,)
    assert data.train.sample(0).max() < 300


def test_cold_warm_and_fresh_caches_give_the_same(tmp_path: Path) -> None:
    config = write_text(tmp_path / "a.txt")
    cold = everything(open_data(config, MODEL, 0))
    assert everything(open_data(config, MODEL, 0)) == cold
    fresh = dataclasses.replace(config, cache=str(tmp_path / "fresh"))
    assert everything(open_data(fresh, MODEL, 0)) == cold
    for file in (tmp_path / "cache").iterdir():
        assert file.read_bytes() == (tmp_path / "fresh" / file.name).read_bytes()


def test_the_second_use_neither_trains_nor_tokenizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_text(tmp_path / "a.txt")
    cold = everything(open_data(config, MODEL, 0))
    monkeypatch.setattr("thinwire.data.parts.train_tokenizer", None)
    monkeypatch.setattr("thinwire.data.parts.encode_pieces", None)
    assert everything(open_data(config, MODEL, 0)) == cold


@pytest.mark.parametrize("kind", ["*.npy", "*.json", "*.tokenizer.json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "gone", "other"])
def test_a_damaged_cache_is_rebuilt(tmp_path: Path, kind: str, harm: str) -> None:
    config = write_text(tmp_path / "a.txt", 600)
    good = everything(open_data(config, MODEL, 0))
    files = {path: path.read_bytes() for path in (tmp_path / "cache").glob(kind)}
    assert files
    for path, content in files.items():
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        path.unlink()
        if harm != "gone":
            path.write_bytes({"flip": flipped, "cut": content[:-1], "empty": b"", "other": b"[1, 2, 3]"}[harm])
    assert everything(open_data(config, MODEL, 0)) == good
    assert {path: path.read_bytes() for path in files} == files


def test_changed_text_is_not_taken_from_the_cache(tmp_path: Path) -> None:
    config = write_text(tmp_path / "a.txt")
    before = open_data(config, MODEL, 0).fingerprint
    with open(tmp_path / "a.txt", "a") as file:
        file.write("one more line\n")
    assert open_data(config, MODEL, 0).fingerprint != before


def test_processes_that_build_the_cache_at_once_agree(tmp_path: Path) -> None:
    config = write_text(tmp_path / "a.txt")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = [context.Process(target=open_in_process, args=(config, queue)) for _ in range(3)]
    for worker in workers:
        worker.start()
    found = [queue.get(timeout=HANG) for _ in workers]
    for worker in workers:
        worker.join(timeout=HANG)
        assert worker.exitcode == 0
    alone = everything(open_data(dataclasses.replace(config, cache=str(tmp_path / "alone")), MODEL, 0))
    assert found == [alone] * 3
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_the_seed_changes_the_order_and_nothing_else(tmp_path: Path) -> None:
    config = write_text(tmp_path / "a.txt")
    first, other = open_data(config, MODEL, 0), open_data(config, MODEL, 1)
    assert not np.array_equal(first.train.batch(0, 20), other.train.batch(0, 20))
    assert first.fingerprint == other.fingerprint
    assert np.array_equal(first.validation.evenly(9), other.validation.evenly(9))


def test_max_tokens_limits_text(tmp_path: Path) -> None:
    config = dataclasses.replace(write_text(tmp_path / "a.txt"), max_tokens=100)
    data = open_data(config, MODEL, 0)
    assert (len(data.train.windows.stream), len(data.validation.stream)) == (100, 100)
    with pytest.raises(ValueError, match=r"max_tokens is 0.*--data\.max_tokens"):
        open_data(dataclasses.replace(config, max_tokens=0), MODEL, 0)


def test_a_source_too_short_is_refused_with_numbers(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a few words and no more")
    config = DataConfig(source=str(tmp_path / "short.txt"), cache=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"part of data\.source '.*short\.txt': \d+ tokens found, but one sequence needs 65 .*more text"):
        open_data(config, ModelConfig(vocabulary=300, context=64), 0)
    (tmp_path / "short.txt").write_text("x")  # leaves nothing for validation
    with pytest.raises(ValueError, match=r"validation part of .*: 0 tokens found"):
        open_data(config, ModelConfig(vocabulary=300, context=1), 0)


def test_a_tokenizer_file_is_used_and_must_fit(tmp_path: Path) -> None:
    config = write_text(tmp_path / "a.txt")
    trained = open_data(config, MODEL, 0)
    assert trained.tokenizer_json is not None
    (tmp_path / "tokenizer.json").write_text(trained.tokenizer_json)
    loaded = dataclasses.replace(config, tokenizer=str(tmp_path / "tokenizer.json"))
    assert everything(open_data(loaded, MODEL, 0)) == everything(trained)
    with pytest.raises(ValueError, match=r"300 entries, but model\.vocabulary is 299"):
        open_data(loaded, ModelConfig(vocabulary=299, context=16), 0)


def test_a_large_vocabulary_is_kept_in_32_bits(tmp_path: Path) -> None:
    config = write_text(tmp_path / "a.txt")
    small = open_data(config, MODEL, 0)
    assert small.tokenizer is not None
    small.tokenizer.add_tokens([f"<unused {number}>" for number in range(65_536)] + ["größe"])
    small.tokenizer.save(str(tmp_path / "large.json"))
    config = dataclasses.replace(config, tokenizer=str(tmp_path / "large.json"))
    data = open_data(config, ModelConfig(vocabulary=70_000, context=16), 0)
    stream = data.train.windows.stream
    assert stream.pieces[0][1].dtype == np.uint32
    assert stream.read(0, len(stream)).max() == 300 + 65_536


def test_a_cache_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    config = write_text(tmp_path / "a.txt")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"data\.cache .* cannot be .*--data\.cache"):
        open_data(dataclasses.replace(config, cache=str(tmp_path / "file" / "cache")), MODEL, 0)


def test_stdlib_trains_and_opens_from_the_cache_the_second_time(tmp_path: Path, monkeypatch) -> None:
    config = DataConfig(cache=str(tmp_path), max_tokens=500_000)
    model = ModelConfig(vocabulary=512, context=128)
    data = open_data(config, model, 0)
    assert data.tokenizer is not None
    assert data.tokenizer.get_vocab_size() == 512
    assert len(data.train) == 3906
    assert len(data.validation) > 500
    assert data.bytes_per_token is not None
    assert 1.8 < data.bytes_per_token < 4
    for name in ("train_tokenizer", "encode_pieces"):
        monkeypatch.delattr(f"thinwire.data.parts.{name}")  # nothing is done again
    again = open_data(config, model, 0)
    assert everything(again) == everything(data)
