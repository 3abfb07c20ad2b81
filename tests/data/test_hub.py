"""Hugging Face datasets, streamed from local folders: no network."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from thinwire.config.sections import DataConfig, ModelConfig
from thinwire.data.hub import open_hub, parse_name
from thinwire.data.open import Data, open_data
from thinwire.data.source import in_validation

pytest.importorskip("datasets")


def write_rows(path: Path, count: int, word: str, column: str = "text") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({column: f"{word} number {number} of the rows"}) + "\n" for number in range(count)))


def open_folder(folder: Path, **options: object) -> Data:
    data = DataConfig(source=f"hf:{folder}", cache=str(folder.parent / "cache"), **options)  # type: ignore[arg-type]
    return open_data(data, ModelConfig(vocabulary=300, context=8), seed=0)


def texts_of(data: Data, split: str) -> list[str]:
    assert data.tokenizer is not None
    stream = data.train.windows.stream if split == "train" else data.validation.stream
    text = data.tokenizer.decode(stream.read(0, len(stream)).tolist(), skip_special_tokens=False)
    return text.split("<|end|>")[:-1]


@pytest.mark.parametrize("name", ["validation", "test"])
def test_the_dataset_own_validation_split_is_used(tmp_path: Path, name: str) -> None:
    write_rows(tmp_path / "rows" / "train.jsonl", 50, "training")
    write_rows(tmp_path / "rows" / f"{name}.jsonl", 20, "checking")
    data = open_folder(tmp_path / "rows")
    assert texts_of(data, "train") == [f"training number {number} of the rows" for number in range(50)]
    assert texts_of(data, "validation") == [f"checking number {number} of the rows" for number in range(20)]
    assert data.bytes_per_token == pytest.approx(sum(map(len, texts_of(data, "validation"))) / len(data.validation.stream))


def test_without_one_documents_are_split_by_number(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows" / "train.jsonl", 100, "training")
    data = open_folder(tmp_path / "rows")
    expected = [f"training number {number} of the rows" for number in range(100) if in_validation(str(number))]
    assert texts_of(data, "validation") == expected
    assert len(texts_of(data, "train")) == 100 - len(expected)


def test_max_tokens_stops_the_stream_and_a_tenth_is_validation(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows" / "train.jsonl", 300, "training")
    data = open_folder(tmp_path / "rows", max_tokens=500)
    assert (len(data.train.windows.stream), len(data.validation.stream)) == (500, 50)


def test_the_second_use_does_not_load_the_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "rows" / "train.jsonl", 100, "training")
    first = open_folder(tmp_path / "rows")
    monkeypatch.setattr("datasets.load_dataset", None)
    assert open_folder(tmp_path / "rows").fingerprint == first.fingerprint


def test_changed_rows_are_read_again(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows" / "train.jsonl", 100, "training")
    first = open_folder(tmp_path / "rows")
    write_rows(tmp_path / "rows" / "train.jsonl", 101, "training")
    assert open_folder(tmp_path / "rows").fingerprint != first.fingerprint


def test_the_text_column_is_named_by_the_user(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows" / "train.jsonl", 100, "training", column="body")
    assert texts_of(open_folder(tmp_path / "rows", text_column="body"), "train")
    with pytest.raises(ValueError, match=r"no column 'text': set --data\.text_column to one of \['body'\]"):
        open_folder(tmp_path / "rows")


def test_a_column_of_numbers_and_a_missing_train_split_are_refused(tmp_path: Path) -> None:
    (tmp_path / "numbers").mkdir()
    (tmp_path / "numbers" / "train.jsonl").write_text('{"text": 1}\n{"text": 2}\n')
    with pytest.raises(ValueError, match="holds int, not text"):
        open_folder(tmp_path / "numbers")
    write_rows(tmp_path / "checks" / "test.jsonl", 9, "checking")
    with pytest.raises(ValueError, match=r"splits \['test'\], but no 'train'"):
        open_folder(tmp_path / "checks")


def test_a_missing_dataset_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none.*cannot be opened.*check the name"):
        open_folder(tmp_path / "none")


@pytest.mark.parametrize(
    "source, expected",
    [
        ("hf:tinystories", ("tinystories", None)),
        ("hf:owner/name", ("owner/name", None)),
        ("hf:owner/name:config-1.2", ("owner/name", "config-1.2")),
        (r"hf:C:\data\rows", (r"C:\data\rows", None)),
        ("hf:C:/data/rows", ("C:/data/rows", None)),
        (r"hf:C:\data\rows:en", (r"C:\data\rows", "en")),
        ("hf:/data/ro:ws/x", ("/data/ro:ws/x", None)),
    ],
)
def test_names_and_configs_are_told_apart(source: str, expected: tuple[str, str | None]) -> None:
    assert parse_name(source) == expected


def test_an_existing_folder_with_a_colon_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "a:b").mkdir()
    assert parse_name(f"hf:{tmp_path}/a:b") == (f"{tmp_path}/a:b", None)
    assert parse_name(f"hf:{tmp_path}:plain_text") == (str(tmp_path), "plain_text")


@pytest.mark.parametrize("source", ["hf:", "hf:name:", "hf::config"])
def test_a_name_that_is_none_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="names no dataset"):
        parse_name(source)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ValueError, match=r"pip install -c constraints.txt -e '.\[hf\]'"):
        open_hub("hf:name", "text")


def test_a_dataset_that_streams_by_goes_on_at_any_sample(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows" / "train.jsonl", 300, "training")
    whole, data = open_folder(tmp_path / "rows"), open_folder(tmp_path / "rows", buffer=20)
    windows = [whole.train.windows.read(index).tolist() for index in range(len(whole.train))]
    found = [data.train.sample(index).tolist() for index in range(len(windows))]
    assert all(sorted(found[start : start + 20]) == sorted(windows[start : start + 20]) for start in range(0, len(windows), 20))
    assert open_folder(tmp_path / "rows", buffer=20).train.sample(211).tolist() == found[211]


def test_rows_of_a_dataset_can_be_answered(tmp_path: Path) -> None:
    rows = tmp_path / "rows" / "train.jsonl"
    rows.parent.mkdir()
    rows.write_text("".join(json.dumps({"prompt": f"{number} and", "completion": f" {number + 1}"}) + "\n" for number in range(50)))
    data = open_folder(tmp_path / "rows", loss="completions")
    assert data.tokenizer is not None
    sample = data.train.sample(0)
    first, second = data.tokenizer.decode([int(each) if each >= 0 else ~int(each) for each in sample]).split(" and ")
    assert int(second) == int(first) + 1 and data.tokenizer.decode(sample[sample >= 0].tolist()) == f" {second}"
