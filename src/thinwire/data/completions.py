"""Turn rows of prompt and completion, or of messages, into marked ids (`bits/targets.py`): only what is to be answered counts.

The text of a row is tokenised as a whole, and a token counts if any of it belongs to an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from thinwire.bits.targets import mark_ids
from thinwire.data.chat import Chat, Spans
from thinwire.data.rows import Row
from thinwire.data.tokenize import end_token, group_pieces

START = -(2**31)
"""Stands in front of each example; no mark of an id is that small."""
FORMS = "rows hold prompt and completion, two texts, or messages, a list of objects with role and content"
MESSAGES = "messages"


@dataclass(frozen=True)
class Answered:
    """A row as text."""

    where: str
    answers: Spans
    whole: bool = True
    """Whether special tokens are in the text: it is a chat template's."""


def row_texts(row: Any) -> list[str]:
    """Return the texts in a row, to train a tokenizer on."""
    if isinstance(row, dict) and MESSAGES not in row:
        return [row[key] for key in ("prompt", "completion") if isinstance(row.get(key), str)]
    return []


@dataclass(frozen=True)
class Completions:
    """Encode rows with a tokenizer and, where there are messages, its chat template."""

    tokenizer: Tokenizer
    chat: Callable[[], Chat]
    separator: int | None = None
    """Token that ends an example where several lie in a window; it must not be inside one."""

    @cached_property
    def front(self) -> list[int]:
        """Return the special tokens that this tokenizer puts in front of a text."""
        encoded = self.tokenizer.encode("a", add_special_tokens=True)
        plain = next((index for index, special in enumerate(encoded.special_tokens_mask) if not special), 0)
        return encoded.ids[:plain]

    def encode(self, rows: Iterable[Row], limit: int) -> Iterator[tuple[np.ndarray, int]]:
        """Yield each example as START and marked ids, and the bytes of its text, about `limit` ids in all."""
        for group in group_pieces(self.word(*row) for row in rows):
            encodings = self.tokenizer.encode_batch([text for text, _ in group], add_special_tokens=False)
            for (text, answered), encoding in zip(group, encodings, strict=True):
                marked_N = self.mark(answered, encoding.ids, encoding.offsets)
                yield np.concatenate(([START], marked_N)), len(text.encode())
                limit -= len(marked_N)
                if limit <= 0:
                    return

    def word(self, where: str, row: Any) -> tuple[str, Answered]:
        """Return the text of a row and what is to be answered in it."""
        if isinstance(row, dict) and MESSAGES in row:
            check_messages(where, row[MESSAGES])
            try:
                text, spans = self.chat().read(row[MESSAGES])
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            return text, Answered(where, spans)
        prompt, completion = (row.get(key) if isinstance(row, dict) else None for key in ("prompt", "completion"))
        if not isinstance(prompt, str) or not isinstance(completion, str):
            there = ", ".join(sorted(map(str, row))) or "nothing" if isinstance(row, dict) else type(row).__name__
            raise ValueError(f"{where} holds {there}: {FORMS}")
        return prompt + completion, Answered(where, [(len(prompt), len(prompt) + len(completion))], whole=False)

    def mark(self, answered: Answered, ids: list[int], offsets: list[tuple[int, int]]) -> np.ndarray:
        """Mark the ids of a row; behind a completion comes the end of a document, which is to be learnt too."""
        begin, end = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
        counts = np.zeros(len(ids), bool)
        for start, stop in answered.answers:
            counts |= (end > start) & (begin < stop)
        if not answered.whole:
            last = end_token(self.tokenizer)
            tail = [] if last is None else [last]
            ids = [*self.front, *ids, *tail]
            counts = np.concatenate((np.zeros(len(self.front), bool), counts, np.ones(len(tail), bool)))
        if self.separator is not None:
            if self.separator in ids[:-1]:
                raise ValueError(
                    f"{answered.where} has the token {self.separator}, model.separator, inside: it would be read as two examples; set "
                    "--model.separator to a token that occurs nowhere, or leave it out for one example per window"
                )
            if not ids or ids[-1] != self.separator:
                ids, counts = [*ids, self.separator], np.append(counts, False)
        counts[:1] = False  # nothing predicts the first
        return mark_ids(np.array(ids, dtype=np.int64), counts)


def check_messages(where: str, messages: Any) -> None:
    """Refuse what is no conversation."""
    if not isinstance(messages, list) or not all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages):
        raise ValueError(f"{where}: messages are no list of objects with a role: {FORMS}")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError(f"{where}: no message is the assistant's, so there is nothing to learn; leave the row out")
