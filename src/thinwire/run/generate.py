"""Write text with a run's newest checkpoint in this process; the same seed gives the same text everywhere.

The verb is `cli/generate.py`; one worker per stage does the same in `cluster/generate.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from thinwire.config.sections import RunConfig
from thinwire.data.tokenize import end_token
from thinwire.pipeline.decode import Writer
from thinwire.pipeline.inprocess import build_codec, build_pipeline
from thinwire.pipeline.meter import Meter, Traffic
from thinwire.run.sampling import Sampler, Sampling
from thinwire.run.saved import load_here
from thinwire.util.device import choose_device

CONTEXT_TOKENS = 8
"""Tokens of the prompt that decide how the first new ones are written."""
Heard = Callable[[int], None]
"""Takes every token that is written."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What stage 0 tells the others about the text to write."""

    length: int
    """Tokens of the prompt."""
    limit: int
    end: int | None
    sampling: Sampling

    @classmethod
    def of(cls, message: dict[str, Any]) -> Order:
        return cls(**message | {"sampling": Sampling(**message["sampling"])})


def refuse_whole_sequences(config: RunConfig, run: Path) -> None:
    """Refuse a codec through which text cannot be written token by token."""
    if config.pipeline.stages > 1 and not build_codec(config).by_token:
        raise ValueError(
            f"the codec {config.codec.name!r} looks at a whole sequence at once, so text cannot be written token by token through it; "
            f"export the plain network and let transformers write: thinwire export {run} OUT"
        )


def read_prompt(words: str, limit: int, sampling: Sampling, tokenizer: Tokenizer, config: RunConfig) -> tuple[list[int], Order]:
    """Turn the prompt into tokens, and up to `limit` new ones into an order; an empty prompt is the end of the document before."""
    if limit < 1:
        raise ValueError(f"max_new_tokens is {limit}; choose 1 or more")
    end = end_token(tokenizer)
    prompt = tokenizer.encode(words, add_special_tokens=False).ids
    if not prompt:
        if end is None:
            raise ValueError("the prompt is empty and the tokenizer has no token for the end of a document; give --prompt TEXT")
        prompt = [end]
    return prompt, Order(length=len(prompt), limit=limit, end=end, sampling=sampling)


def longer_than_trained(order: Order, config: RunConfig) -> str | None:
    """Say that the text may become longer than what the model was trained on; None: it cannot."""
    total = order.length + order.limit
    if total <= config.model.context:
        return None
    return (
        f"prompt and new tokens are up to {total} tokens, the model was trained on {config.model.context}; beyond them the text gets worse"
    )


def write_here(config: RunConfig, run: Path, prompt: list[int], order: Order, heard: Heard) -> list[Meter]:
    """Write the text with all stages in this process; return what crossed each boundary."""
    pipeline = build_pipeline(config, choose_device(config.device))
    torch.set_num_threads(config.train.threads or torch.get_num_threads())
    writer = Writer(pipeline.stages, pipeline.codec, load_here(run, pipeline.stages), config.train.dtype)
    for token in writer.write(prompt, order.limit, order.end, Sampler(order.sampling)):
        heard(token)
    return writer.meters


class Text:
    """Turn tokens into text while they come."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], write: Callable[[str], object]) -> None:
        """Hand every piece of text to `write` as soon as no later token can change it."""
        self.tokenizer, self.write = tokenizer, write
        self.stream = DecodeStream(skip_special_tokens=True)
        # Some tokenizers write a token differently at the beginning of a text.
        self.before = prompt[-CONTEXT_TOKENS:]
        self.seen = sum(len(self.stream.step(tokenizer, token) or "") for token in self.before)
        """Characters that are not to be written, or were."""
        self.tokens: list[int] = []
        self.times: list[float] = []

    def add(self, token: int) -> None:
        """Write what a token completes."""
        self.tokens.append(token)
        self.times.append(time.perf_counter())
        if piece := self.stream.step(self.tokenizer, token):
            self.seen += len(piece)
            self.write(piece)

    def finish(self) -> None:
        """Write what is left: a character whose last bytes were not written."""
        if rest := self.tokenizer.decode([*self.before, *self.tokens])[self.seen :]:
            self.write(rest)

    def describe(self, meters: list[Meter]) -> str:
        """Say in a line how many tokens there were, how fast, and what crossed."""
        traffic, parts = Traffic(meters), [f"{len(self.tokens)} tokens"]
        if len(self.tokens) > 1:
            parts.append(f"{(len(self.tokens) - 1) / (self.times[-1] - self.times[0]):.1f} tokens/s after the first")
        if traffic.per_token("forward"):
            size = traffic.per_token("forward") + traffic.per_token("backward")
            parts.append(f"{size:.1f} bytes per new token and boundary")
        return ", ".join(parts)
