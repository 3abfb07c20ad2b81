"""Rows to learn answers from, and a tokenizer with a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def sums(count: int = 60) -> list[dict[str, Any]]:
    """Return rows of prompt and completion of different lengths."""
    return [
        {"prompt": f"what is {number} plus {number % 7}?", "completion": f" {number + number % 7}" * (1 + number % 3)}
        for number in range(count)
    ]


def talks(count: int = 60) -> list[dict[str, Any]]:
    """Return rows of messages, some with two answers."""
    rows = []
    for row in sums(count):
        turn = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        rows.append({"messages": [{"role": "system", "content": "add"}, *turn * (1 + len(rows) % 2)]})
    return rows


def write_rows(path: Path, rows: list[Any]) -> Path:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_tokenizer(folder: Path, template: str | None = TEMPLATE, *, beside: bool = False) -> Path:
    """Make a byte-level tokenizer with a chat template in its settings, or in a file beside them."""
    from thinwire.data.tokenize import END, train_tokenizer

    folder.mkdir()
    train_tokenizer([(f"{row['prompt']}{row['completion']}", True) for row in sums()], None, 300).save(str(folder / "tokenizer.json"))
    settings = {"eos_token": {"content": END}} | ({} if template is None or beside else {"chat_template": template})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if beside and template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
