"""Token shards: layout, split, and every way they can be damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from thinwire.config.sections import DataConfig, ModelConfig
from thinwire.data.open import Data, open_data
from thinwire.data.shards import open_shard, write_shard
from thinwire.data.tokenize import train_tokenizer


def open_bin(pattern: Path, vocabulary: int = 300, **options: object) -> Data:
    """Open shards with a context of 8."""
    return open_data(DataConfig(source=str(pattern), **options), ModelConfig(vocabulary=vocabulary, context=8), seed=0)  # type: ignore[arg-type]


def damage(path: Path, number: int, value: int) -> None:
    """Overwrite one number of a shard's header."""
    content = bytearray(path.read_bytes())
    content[4 * number : 4 * number + 4] = value.to_bytes(4, "little", signed=True)
    path.write_bytes(content)


def test_layout_is_that_of_the_speedruns(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", [1, 2, 65535])
    content = (tmp_path / "a.bin").read_bytes()
    assert np.frombuffer(content[:1024], "<i4").tolist() == [20240520, 1, 3] + [0] * 253
    assert np.frombuffer(content[1024:], "<u2").tolist() == [1, 2, 65535]
    assert [file.name for file in tmp_path.iterdir()] == ["a.bin"]


def test_shards_are_mapped_not_read(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", range(100))
    tokens_N = open_shard(tmp_path / "a.bin")
    assert isinstance(tokens_N, np.memmap)
    assert tokens_N.tolist() == list(range(100))


@pytest.mark.parametrize("tokens", [[], [-1, 2], [2**31], [0.5], [[1, 2], [3, 4]]])
def test_what_does_not_fit_a_shard_is_not_written(tmp_path: Path, tokens: list) -> None:
    with pytest.raises(ValueError, match=r"a\.bin: a shard"):
        write_shard(tmp_path / "a.bin", tokens)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shard(tmp_path / "a.bin", [1, 2, 3])

    def fail(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_shard(tmp_path / "a.bin", [4, 5, 6])
    assert open_shard(tmp_path / "a.bin").tolist() == [1, 2, 3]
    assert [file.name for file in tmp_path.iterdir()] == ["a.bin"]


def test_files_named_val_are_validation_and_shards_join_in_order(tmp_path: Path) -> None:
    for name, first in (("corpus_train_000001.bin", 100), ("corpus_train_000000.bin", 0), ("corpus_val_000000.bin", 200)):
        write_shard(tmp_path / name, np.arange(first, first + 100))
    data = open_bin(tmp_path / "*.bin")
    assert data.train.windows.stream.read(0, 200).tolist() == list(range(200))
    assert data.validation.stream.read(0, 100).tolist() == list(range(200, 300))
    assert (data.tokenizer, data.tokenizer_json, data.bytes_per_token) == (None, None, None)
    assert data.train.batch(0, 4).shape == (4, 9)


@pytest.mark.parametrize("name", ["a{}.bin", "val{}.bin"])
def test_without_both_kinds_the_last_tenth_is_validation(tmp_path: Path, name: str) -> None:
    write_shard(tmp_path / name.format(0), np.arange(195))
    write_shard(tmp_path / name.format(1), np.arange(195, 200))
    data = open_bin(tmp_path / "*.bin")
    assert len(data.train.windows.stream) == 180
    assert data.validation.stream.read(0, 20).tolist() == list(range(180, 200))


def test_max_tokens_holds_for_each_split(tmp_path: Path) -> None:
    write_shard(tmp_path / "train.bin", np.arange(200))
    write_shard(tmp_path / "val.bin", np.arange(200))
    data = open_bin(tmp_path / "*.bin", max_tokens=50)
    assert (len(data.train.windows.stream), len(data.validation.stream)) == (50, 50)


@pytest.mark.parametrize(
    "number, value, message",
    [
        (0, 7, "starts with 7, not with the shard magic"),
        (1, 3, "version 3"),
        (2, 99, "1224 bytes, but"),
        (2, 0, "0 tokens"),
        (2, -5, "-5 tokens"),
    ],
)
def test_a_damaged_header_is_refused_by_name(tmp_path: Path, number: int, value: int, message: str) -> None:
    write_shard(tmp_path / "a.bin", np.arange(100))
    damage(tmp_path / "a.bin", number, value)
    with pytest.raises(ValueError, match=message) as caught:
        open_bin(tmp_path / "a.bin")
    assert "a.bin" in str(caught.value)
    assert "write" in str(caught.value)


@pytest.mark.parametrize("length", [0, 3, 1023, 1024, 1025, 1222, 1223])
def test_a_truncated_shard_is_refused_at_every_length(tmp_path: Path, length: int) -> None:
    write_shard(tmp_path / "a.bin", np.arange(100))
    (tmp_path / "a.bin").write_bytes((tmp_path / "a.bin").read_bytes()[:length])
    with pytest.raises(ValueError, match=rf"a\.bin is {length} bytes.*again"):
        open_bin(tmp_path / "a.bin")


def test_an_id_outside_the_vocabulary_is_refused_at_open(tmp_path: Path) -> None:
    write_shard(tmp_path / "train.bin", np.arange(280))
    write_shard(tmp_path / "val.bin", np.arange(300))
    with pytest.raises(
        ValueError, match=r"val\.bin holds token id 299, but model\.vocabulary is 280: set --model\.vocabulary to at least 300"
    ):
        open_bin(tmp_path / "*.bin", vocabulary=280)


def test_fingerprint_follows_the_tokens_not_the_path(tmp_path: Path) -> None:
    for folder, last in (("a", 5), ("b", 5), ("c", 6)):
        (tmp_path / folder).mkdir()
        write_shard(tmp_path / folder / "x.bin", [*range(250), last])
    first, same, other = (open_bin(tmp_path / folder / "x.bin").fingerprint for folder in "abc")
    assert first == same != other


def test_a_tokenizer_given_with_shards_measures_bytes(tmp_path: Path) -> None:
    text = "the cat sat on the mat, später. " * 40
    tokenizer = train_tokenizer([(text, True)], None, 300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_shard(tmp_path / "train.bin", tokenizer.encode(text).ids)
    write_shard(tmp_path / "val.bin", tokenizer.encode(text).ids)
    data = open_bin(tmp_path / "*.bin", tokenizer=str(tmp_path / "tokenizer.json"))
    assert data.bytes_per_token == len(text.encode()) / len(tokenizer.encode(text).ids)
    assert data.tokenizer_json == tokenizer.to_str()
    with pytest.raises(ValueError, match=r"entries, but model\.vocabulary is 260"):
        open_bin(tmp_path / "*.bin", vocabulary=260, tokenizer=str(tmp_path / "tokenizer.json"))


def test_shards_and_text_are_not_mixed(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", np.arange(100))
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(ValueError, match="mixes shards"):
        open_bin(tmp_path / "*")
