"""Open what a run trains on: the one door to this package.

Puts the sources of a run together; how one of them is opened is `parts.py`'s job, how several are drawn from `mixture.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from thinwire.config.sections import DataConfig, ModelConfig
from thinwire.data.batches import Samples, Windows
from thinwire.data.cache import cache_key
from thinwire.data.mixture import MixedWindows, Mixture
from thinwire.data.parts import Opening, Report, check_source, open_part, open_plain, text_tokenizer
from thinwire.data.weights import parse_mixture


@dataclass(frozen=True, kw_only=True)
class Data:
    """Hold the batches of a run and what describes them."""

    train: Samples
    validation: Windows
    tokenizer: Tokenizer | None
    tokenizer_json: str | None
    bytes_per_token: float | None
    """UTF-8 bytes of validation text per token: bits per byte = loss / ln 2 / this."""
    fingerprint: str
    """sha256 that identifies both token streams."""


def open_data(data: DataConfig, model: ModelConfig, seed: int, report: Report = lambda event: None) -> Data:
    """Open `data.source` as batches of `model.context` tokens in the order of `seed`; `report` is told if it has to be tokenised."""
    if data.max_tokens < 1:
        raise ValueError(f"data.max_tokens is {data.max_tokens}: set --data.max_tokens to at least {model.context + 1}")
    sources = parse_mixture(data.source)
    tokenizer = None if len(sources) == 1 else common_tokenizer(data, model, report)
    one_each = [replace(data, source=name) for name, _ in sources]
    parts = [open_part(Opening(each, model, seed, report, tokenizer)) for each in one_each]
    train, validation, tokenizer, size = parts[0].train, parts[0].validation, parts[0].tokenizer, parts[0].bytes_per_token
    fingerprint = parts[0].fingerprint
    if len(parts) > 1:
        weights = [weight for _, weight in sources]
        train, validation = (
            Mixture([part.train for part in parts], weights, seed),
            MixedWindows([part.validation for part in parts], weights),
        )
        size = mean_size([(part.bytes_per_token, float(weight)) for part, weight in zip(parts, weights, strict=True)])
        fingerprint = cache_key("mixture", [part.fingerprint for part in parts], [str(weight / sum(weights)) for weight in weights])
    text = None if tokenizer is None else tokenizer.to_str()
    return Data(train=train, validation=validation, tokenizer=tokenizer, tokenizer_json=text, bytes_per_token=size, fingerprint=fingerprint)


def mean_size(parts: list[tuple[float | None, float]]) -> float | None:
    """Return the bytes per token of a mixture, where all of them are known."""
    known = [(size, weight) for size, weight in parts if size is not None]
    return sum(size * weight for size, weight in known) / sum(weight for _, weight in known) if len(known) == len(parts) else None


def source_files(data: DataConfig) -> list[Path]:
    """Return the files that the sources name, without reading them; none for sources that are no files."""
    return [path for name, _ in parse_mixture(data.source) for path in check_source(replace(data, source=name))]


def common_tokenizer(data: DataConfig, model: ModelConfig, report: Report) -> Tokenizer | None:
    """Return the tokenizer that the sources of a mixture have in common."""
    if data.tokenizer != "train":
        return None  # each opens the one that is named
    each = [replace(data, source=name) for name, _ in parse_mixture(data.source)]
    found = [(one, check_source(one)) for one in each]
    shards = [paths[0] for _, paths in found if paths and paths[0].suffix == ".bin"]
    if shards or data.marked:
        what = f"{shards[0]} holds tokens" if shards else "rows of several sources"
        raise ValueError(f"data.source {data.source!r}: {what} need one tokenizer for all: set --data.tokenizer to it")
    opening = Opening(data, model, 0, report)
    return text_tokenizer([open_plain(one, paths) for one, paths in found], data, model, opening.folder, opening.teller())
