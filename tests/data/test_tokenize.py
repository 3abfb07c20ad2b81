"""Training, loading and applying tokenizers."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from patience import HANG
from thinwire.data.tokenize import END, check_fits, encode_pieces, end_token, load_tokenizer, sample_text, train_tokenizer, vocabulary_size

WORDS = ["stage", "boundary", "codec", "payload", "frame", "link", "basis", "rank", "replica", "größe", "naïve", "数据"]


def make_text(seed: int, words: int = 4000) -> str:
    """Make text of made-up words, enough to train a few hundred merges."""
    generator = np.random.default_rng(seed)
    return " ".join(WORDS[generator.integers(len(WORDS))] + str(generator.integers(1000)) for _ in range(words))


def train_small(vocabulary: int = 400, seed: int = 0) -> Tokenizer:
    return train_tokenizer([(make_text(seed), True)], None, vocabulary)


def encode(tokenizer: Tokenizer, pieces: list[tuple[str, bool]], limit: int) -> tuple[list[int], int]:
    parts = list(encode_pieces(tokenizer, pieces, limit))
    return [int(number) for ids_N, _ in parts for number in ids_N], sum(size for _, size in parts)


def test_training_gives_exactly_the_vocabulary_asked_for() -> None:
    for vocabulary in (257, 400, 512):
        tokenizer = train_small(vocabulary)
        assert vocabulary_size(tokenizer) == tokenizer.get_vocab_size() == vocabulary
        assert tokenizer.token_to_id(END) == end_token(tokenizer)


def test_training_is_byte_identical() -> None:
    assert train_small().to_str() == train_small().to_str()
    assert train_small().to_str() != train_small(seed=1).to_str()


def test_a_small_text_gives_a_smaller_vocabulary() -> None:
    tokenizer = train_tokenizer([("aa bb", True)], None, 4096)
    assert 257 <= vocabulary_size(tokenizer) < 300


def test_a_vocabulary_below_all_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.vocabulary is 256.*257"):
        train_small(256)


def test_any_text_survives_encoding_and_decoding() -> None:
    tokenizer = train_small()
    for text in ("  leading, tabs\t and\r\n\n\n newlines ", "日本語 😀 é", "\x00\x7f", "def f(x):\n        return x"):
        ids, size = encode(tokenizer, [(text, False)], 1000)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert size == len(text.encode())


def test_one_end_token_closes_each_document() -> None:
    tokenizer = train_small()
    end = end_token(tokenizer)
    ids, size = encode(tokenizer, [("first ", False), ("half", True), ("second", True)], 1000)
    assert [index for index, number in enumerate(ids) if number == end][1] == len(ids) - 1
    assert ids.count(end) == 2
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"first half{END}second{END}"
    assert size == len("first halfsecond")


def test_the_limit_is_exact_and_counts_only_the_text_kept() -> None:
    tokenizer = train_small()
    pieces = [(make_text(5, 20), True), (make_text(6, 20), True)]
    everything, size = encode(tokenizer, pieces, 10_000)
    assert size == sum(len(text.encode()) for text, _ in pieces)
    for limit in range(1, len(everything) + 1):
        ids, size = encode(tokenizer, pieces, limit)
        assert ids == everything[:limit]
        kept = tokenizer.decode(ids)  # leaves end tokens out
        if "\ufffd" not in kept:  # the limit can fall inside a character
            assert size == len(kept.encode()), limit


def test_groups_do_not_change_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_small()
    pieces = [(make_text(number, 30), True) for number in range(9)]
    whole = encode(tokenizer, pieces, 10_000)
    monkeypatch.setattr("thinwire.data.tokenize.GROUP_CHARACTERS", 300)
    assert encode(tokenizer, pieces, 10_000) == whole


def test_the_sample_is_a_share_of_every_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.data.tokenize.SAMPLE_BYTES", 100)
    pieces = [(letter * 50, True) for letter in "abcdefgh"]
    assert [len(text) for text in sample_text(pieces, 400)] == [13] * 8
    assert [len(text) for text in sample_text(pieces, 80)] == [50, 50]
    assert [len(text) for text in sample_text(pieces, None)] == [50, 50]


def test_a_tokenizer_is_loaded_from_a_file_or_folder_without_truncation(tmp_path: Path) -> None:
    tokenizer = train_small()
    plain = tokenizer.to_str()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=10)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name in (str(tmp_path / "tokenizer.json"), str(tmp_path), f"hf:{tmp_path}"):
        loaded = load_tokenizer(name)
        assert loaded.to_str() == plain
        assert len(loaded.encode(make_text(1, 50)).ids) > 10


def test_a_missing_or_damaged_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no file .*none\.json.*hf:NAME"):
        load_tokenizer(str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(ValueError, match=r"bad\.json.*cannot be loaded.*again"):
        load_tokenizer(str(tmp_path / "bad.json"))


def test_an_unknown_hub_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Tokenizer:
        raise OSError(f"no route to the Hub for {name}")

    monkeypatch.setattr("thinwire.data.tokenize.Tokenizer", type("Offline", (), {"from_pretrained": staticmethod(fail)}))
    with pytest.raises(ValueError, match=r"hf:some/name.*no route.*check the name and the network"):
        load_tokenizer("hf:some/name")


def test_a_tokenizer_larger_than_the_model_is_refused_with_numbers() -> None:
    tokenizer = train_small(400)
    check_fits(tokenizer, "t", 400)
    with pytest.raises(ValueError, match=r"400 entries, but model\.vocabulary is 399: set --model\.vocabulary 400"):
        check_fits(tokenizer, "t", 399)


def test_the_package_does_not_import_torch() -> None:
    import subprocess

    code = "import sys, thinwire.data.open; sys.exit('torch' in sys.modules or 'datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=HANG, check=False).returncode == 0
