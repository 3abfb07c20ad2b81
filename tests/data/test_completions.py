"""Rows of prompt and completion or of messages: which tokens count, how they lie in windows, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.conversations import TEMPLATE, sums, talks, write_rows, write_tokenizer
from patience import HANG
from thinwire.bits.targets import count_targets
from thinwire.config.sections import DataConfig, ModelConfig
from thinwire.data.open import Data, check_source, open_data

MODEL = ModelConfig(vocabulary=300, context=48)


def opened(folder: Path, rows: list[Any], tokenizer: str = "train", model: ModelConfig = MODEL) -> Data:
    """Open rows through a cache of their own."""
    source = write_rows(folder / "rows.jsonl", rows)
    return open_data(DataConfig(source=str(source), tokenizer=tokenizer, cache=str(folder / "cache"), loss="completions"), model, 0)


def plain(marked: np.ndarray) -> list[int]:
    return np.where(marked < 0, ~marked, marked).tolist()


def answers(data: Data, marked_N: np.ndarray) -> str:
    """Return the text of the tokens that count."""
    assert data.tokenizer is not None
    return data.tokenizer.decode(marked_N[marked_N >= 0].tolist(), skip_special_tokens=False)


def everything(data: Data) -> list[np.ndarray]:
    return [windows.read(index) for windows in (data.train.windows, data.validation) for index in range(len(windows))]


def test_completions_and_the_end_count_and_nothing_else(tmp_path: Path) -> None:
    data = opened(tmp_path, sums())
    assert data.tokenizer is not None
    assert sorted(answers(data, window) for window in everything(data)) == sorted(f"{row['completion']}<|end|>" for row in sums())
    texts = {data.tokenizer.decode(plain(window), skip_special_tokens=True) for window in everything(data)}
    assert texts == {row["prompt"] + row["completion"] for row in sums()}
    assert data.bytes_per_token is None and data.train.windows.tokens > 0


@pytest.mark.parametrize("beside", [False, True])
def test_answers_of_a_conversation_count_as_the_template_words_them(tmp_path: Path, beside: bool) -> None:
    data = opened(tmp_path, talks(), str(write_tokenizer(tmp_path / "tokenizer", beside=beside)), ModelConfig(vocabulary=300, context=200))
    wanted = [f"{row['messages'][-1]['content']}<|end|>\n" * (len(row["messages"]) // 2) for row in talks()]
    assert sorted(answers(data, window) for window in everything(data)) == sorted(wanted)


def test_a_batch_says_how_many_tokens_count_in_the_whole_step(tmp_path: Path) -> None:
    train = opened(tmp_path, sums()).train
    whole = train.batch(0, 8)
    assert whole.shape == (8, 50) and (whole[:, -1] == count_targets(whole[:, :-1])).all()
    parts = np.concatenate([train.batch(start, 2, range(8)) for start in range(0, 8, 2)])
    assert np.array_equal(parts, whole)
    assert train.batch(0, 2)[0, -1] < whole[0, -1]


def test_the_order_and_the_fingerprint_are_those_of_a_fresh_cache(tmp_path: Path) -> None:
    first = opened(tmp_path, sums())
    (tmp_path / "other").mkdir()
    second, other = opened(tmp_path / "other", sums()), opened(tmp_path, sums(59))
    assert first.fingerprint == second.fingerprint != other.fingerprint
    assert np.array_equal(first.train.batch(0, 90), second.train.batch(0, 90))  # more than one epoch
    assert np.array_equal(first.train.batch(30, 20)[:, :-1], first.train.batch(0, 90)[30:50, :-1])


def test_long_examples_are_cut_and_those_without_an_answer_left_out(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    rows = [*sums(40), {"prompt": "x y " * 200, "completion": "never"}, {"prompt": "short", "completion": " far" * 200}] * 2
    source = write_rows(tmp_path / "rows.jsonl", rows)
    data = open_data(DataConfig(source=str(source), cache=str(tmp_path / "cache"), loss="completions"), MODEL, 0, told.append)
    windows = everything(data)
    assert sum("never" in answers(data, window) for window in windows) == 0
    assert sum("far" in answers(data, window) for window in windows) == 2
    assert all(count_targets(window[None]) for window in windows)
    assert told[-1]["cut"] + told[-1]["left_out"] > 0


def test_with_a_separator_examples_share_a_window(tmp_path: Path) -> None:
    apart, packed = opened(tmp_path, sums()), opened(tmp_path, sums(), model=ModelConfig(vocabulary=300, context=48, separator=0))
    assert len(packed.train.windows) < len(apart.train.windows)
    alone = [plain(row) for row in everything(apart)]
    examples = sorted(row[: row.index(0) + 1] for row in alone)
    found = []
    for window in map(plain, everything(packed)):
        while 0 in window and window.index(0):
            found.append(window[: window.index(0) + 1])
            window = window[window.index(0) + 1 :]
    assert sorted(found) == examples
    counted = "".join(sorted(answers(packed, np.concatenate(everything(packed)))))
    assert counted == "".join(sorted(answers(apart, np.concatenate(everything(apart)))))


BAD: dict[str, tuple[list[Any], str]] = {
    "no object": ([1, 2, 3], "line 1 holds int"),
    "other keys": ([{"text": "a"}] * 3, "holds text: rows hold prompt and completion"),
    "a prompt that is no text": ([{"prompt": 3, "completion": "b"}] * 3, "rows hold prompt and completion"),
    "messages that are a text": ([{"messages": "hello"}] * 3, "messages are no list"),
    "no answer": ([{"messages": [{"role": "user", "content": "a"}]}] * 3, "no message is the assistant's"),
    "one row": ([{"prompt": "a", "completion": "b"}], r"has 1 row\(s\)"),
    "messages and no template": (talks(3), "a tokenizer that is trained here has none"),
    "nothing in reach": ([{"prompt": "a b c " * 99, "completion": "b"}] * 3, "none of 2 examples has an answer within 49 tokens"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_refused_by_name(tmp_path: Path, name: str) -> None:
    rows, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        opened(tmp_path, rows)


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"prompt": "a", "completion": "b"}\n\n{"prompt": \n' * 9)
    with pytest.raises(ValueError, match=r"rows.jsonl line 3 is no JSON"):
        open_data(DataConfig(source=str(source), cache=str(tmp_path / "cache"), loss="completions"), MODEL, 0)


TEMPLATES = {
    "none": (None, "has no chat template"),
    "one that raises": ("{{ raise_exception('only two roles') }}", r"line 2: the chat template of .* fails .*only two roles"),
    "damaged": ("{% for message in %}", "the chat template of .* fails"),
    "one that wants out of the sandbox": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "fails .*SecurityError"),
    "one that words the beginning otherwise": ("{{ messages|length }}" + TEMPLATE, "words the beginning of a conversation otherwise"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_bad_templates_are_refused_by_name(tmp_path: Path, name: str) -> None:
    template, message = TEMPLATES[name]
    with pytest.raises(ValueError, match=message):
        opened(tmp_path, talks(), str(write_tokenizer(tmp_path / "tokenizer", template)))


def test_a_separator_inside_an_example_is_refused(tmp_path: Path) -> None:
    model = ModelConfig(vocabulary=300, context=100, separator=0)  # the template ends every message with it
    with pytest.raises(ValueError, match=r"line 2 has the token 0, model.separator, inside"):
        opened(tmp_path, talks(), str(write_tokenizer(tmp_path / "tokenizer")), model)


def test_sources_without_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"0")
    with pytest.raises(ValueError, match="holds tokens that do not say which are answers"):
        check_source(DataConfig(source=str(tmp_path / "a.bin"), loss="completions"))
    with pytest.raises(ValueError, match="'stdlib' has no rows"):
        open_data(DataConfig(loss="completions", cache=str(tmp_path)), MODEL, 0)


def test_without_transformers_the_extra_is_named(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from thinwire.data.chat import open_chat\nfrom thinwire.data.tokenize import load_tokenizer\n"
        "try: open_chat(sys.argv[1], load_tokenizer(sys.argv[1]))\nexcept ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], timeout=HANG, check=True, capture_output=True, text=True)
    assert "need the package transformers" in done.stdout and ".[hf]" in done.stdout
