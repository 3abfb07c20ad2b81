"""Word a conversation as a tokenizer's own chat template does, and say which part of the text the assistant wrote.

A template is a program in Jinja that came with a tokenizer. transformers runs it in Jinja's sandbox, and nothing else does: it needs the
extra `hf`. Not here: tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
KEPT_FOLDER = "imported"
"""Folder in a run that was imported: the small files that came with the model and go out again with it."""
Spans = list[tuple[int, int]]
"""Parts of a text, by its characters."""


@dataclass(frozen=True)
class Chat:
    """A template, and the special tokens that it may name."""

    name: str
    template: str
    special: dict[str, str]
    renderer: Any
    """What transformers render with."""

    def render(self, messages: Sequence[dict[str, Any]], *, begun: bool = False) -> str:
        """Word the messages; `begun`: and the beginning of an answer."""
        from jinja2.exceptions import TemplateError

        try:
            return self.renderer.apply_chat_template(
                list(messages), chat_template=self.template, tokenize=False, add_generation_prompt=begun
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:  # what a template's own code may raise
            raise ValueError(f"the chat template of {self.name} fails ({type(error).__name__}: {error})") from None

    def read(self, messages: Sequence[dict[str, Any]]) -> tuple[str, Spans]:
        """Return the text of a conversation and the parts of it that the assistant wrote."""
        text, spans = self.render(messages), []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, behind = self.render(messages[:index], begun=True), self.render(messages[: index + 1])
            if not (behind.startswith(before) and text.startswith(behind)):
                raise ValueError(
                    f"the chat template of {self.name} words the beginning of a conversation otherwise once message {index + 1} is there, "
                    "so it is not known which tokens are the answer; leave earlier answers out, or give prompt and completion"
                )
            spans.append((len(before), len(behind)))
        return text, spans


def open_chat(name: str, tokenizer: Tokenizer) -> Chat:
    """Find the chat template of `data.tokenizer`."""
    if name == "train":
        raise ValueError(
            "messages need a chat template, and a tokenizer that is trained here has none; set --data.tokenizer to the folder of one that "
            "has, or give rows of prompt and completion"
        )
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise ValueError(
            "messages need the package transformers for the chat template; in the checkout: pip install -c constraints.txt -e '.[hf]'"
        ) from error
    settings, template = find_template(name)
    special = {key: token for key in SPECIAL if (token := token_text(settings.get(key))) is not None}
    return Chat(name, template, special, PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special))


def find_template(name: str) -> tuple[dict[str, Any], str]:
    """Return what `tokenizer_config.json` says, and the template in it or beside it."""
    settings = read_settings_file(name)
    path = find_beside(name, TEMPLATE)
    template = settings.get("chat_template") if path is None else path.read_text(encoding="utf-8")
    if isinstance(template, list):  # several, by name
        template = next((each.get("template") for each in template if isinstance(each, dict) and each.get("name") == "default"), None)
    if not isinstance(template, str) or not template:
        raise ValueError(
            f"data.tokenizer {name!r} has no chat template (neither {TEMPLATE} nor chat_template in {CONFIG}), which messages need; give "
            "rows of prompt and completion, or a tokenizer that has one"
        )
    return settings, template


def template_facts(name: str) -> list[str]:
    """Return what a cache key must know of the files beside a tokenizer; nothing of the Hub's, so as not to ask it again."""
    if not os.path.exists(os.path.expanduser(name.removeprefix("hf:"))):
        return []
    return [path.read_text(encoding="utf-8", errors="replace") for file in (CONFIG, TEMPLATE) if (path := find_beside(name, file))]


def read_settings_file(name: str) -> dict[str, Any]:
    """Read `tokenizer_config.json`, empty where there is none."""
    path = find_beside(name, CONFIG)
    if path is None:
        return {}
    try:
        settings = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} is no JSON object: write it again, or leave it out")
    return settings


def find_beside(name: str, file: str) -> Path | None:
    """Return a file of the tokenizer that `data.tokenizer` names: beside its tokenizer.json, or of the Hub."""
    path = Path(os.path.expanduser(name.removeprefix("hf:")))
    if path.exists():
        folder = path if path.is_dir() else path.parent
        return next((found for found in (folder / file, folder / KEPT_FOLDER / file) if found.is_file()), None)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(name.removeprefix("hf:"), file))
    except EntryNotFoundError:
        return None
    except Exception as error:  # a dozen unrelated types, from DNS failures to names that the Hub does not know
        raise ValueError(f"data.tokenizer {name!r}: {file} cannot be fetched ({error}): check the name and the network") from error


def token_text(token: object) -> str | None:
    """Return a special token as `tokenizer_config.json` has it: a text, or an object with one."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
