"""The tokenizer files of an exported folder, and what a folder that was imported had in their place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from thinwire.data.chat import KEPT_FOLDER
from thinwire.data.tokenize import end_token, load_tokenizer
from thinwire.hf.description import CONFIG_JSON, CONTENTS, DTYPES, TOKENS, read_object
from thinwire.hf.links import copy_file, has_file
from thinwire.run.saved import TOKENIZER_FILE

OF_TOKENS = (TOKENIZER_FILE, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
OTHERS = ("chat_template.json", "tokenizer.model", "vocab.json", "merges.txt", "generation_config.json", CONFIG_JSON)
KEPT = (*OF_TOKENS, *OTHERS)


def keep(folder: Path, run: Path, dtype: torch.dtype, tied: bool) -> None:
    """Copy the small files of a foreign folder into a new run; note the number format of its weights and whether its head was tied."""
    kept = run / KEPT_FOLDER
    kept.mkdir()
    for name in KEPT:
        copy_file(folder, name, kept)
    write_json(kept / CONTENTS, {"dtype": str(dtype).removeprefix("torch."), "tied": tied, "name": model_name(folder)})


def model_name(folder: Path) -> str:
    """Return what a folder is called: on the Hub if it is in the cache of that, else without the folders of this machine."""
    home = folder.absolute().parents
    if len(home) > 1 and home[0].name == "snapshots" and home[1].name.startswith("models--"):
        return home[1].name.removeprefix("models--").replace("--", "/")
    return folder.resolve().name


def kept_notes(run: Path) -> dict[str, Any]:
    """Return what was noted of the folder that an imported run came from; nothing for a run that was not imported."""
    name = f"{KEPT_FOLDER}/{CONTENTS}"
    return read_object(run / name) if has_file(run, name) else {}


def kept_dtype(run: Path) -> torch.dtype | None:
    """Return the number format of the weights that an imported run started from."""
    named = kept_notes(run).get("dtype")
    return next((dtype for dtype in DTYPES.values() if str(dtype) == f"torch.{named}"), None)


def kept_description(run: Path) -> dict[str, Any] | None:
    """Return the `config.json` that an imported run came with."""
    name = f"{KEPT_FOLDER}/{CONFIG_JSON}"
    return read_object(run / name) if has_file(run, name) else None


def write_tokenizer(run: Path, out: Path, context: int) -> dict[str, Any]:
    """Write all files about tokens but `config.json`; return the ids that stand in that."""
    table = kept_description(run)
    if table is not None:
        for name in KEPT:
            if name != CONFIG_JSON and has_file(run, f"{KEPT_FOLDER}/{name}"):
                copy_file(run / KEPT_FOLDER, name, out)
        return {name: table.get(name) for name in TOKENS}
    if not copy_file(run, TOKENIZER_FILE, out):  # a run on token shards may have none
        write_json(out / "generation_config.json", {})
        return {}
    tokenizer = load_tokenizer(str(out / TOKENIZER_FILE))
    end = end_token(tokenizer)
    special = {} if end is None else {"eos_token": tokenizer.id_to_token(end)}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context, "clean_up_tokenization_spaces": False}
    write_json(out / "tokenizer_config.json", about | special)
    write_json(out / "special_tokens_map.json", special)
    write_json(out / "generation_config.json", {} if end is None else {"eos_token_id": end})
    return {"eos_token_id": end}


def write_json(path: Path, table: dict[str, Any]) -> None:
    """Write an object as JSON."""
    path.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
