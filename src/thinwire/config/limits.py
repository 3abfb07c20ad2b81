"""What can be said of settings from the settings alone, without torch: numbers, and what does not go with each other.

Every message has the value, the limit and the fix. What needs the architecture, the cut, the codec or the exchange is `run/check.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter

from thinwire.config.profiles import find_profile
from thinwire.config.sections import RunConfig
from thinwire.util.sizes import near_divisors, read_size

LARGEST_SEED = 2**63 - 1
LARGEST: tuple[tuple[int, str], ...] = (
    (2**10, "train.threads pipeline.stages replicas.count"),
    (2**14, "model.layers"),
    (2**16, "model.heads model.kv_heads adapter.rank pipeline.microbatches"),
    (2**20, "model.width model.head_dim model.ffn train.batch train.validation_sequences"),
    (2**24, "model.vocabulary model.context model.rope_context model.window"),
    (10**9, "train.seconds link.ping_seconds link.silent_seconds link.reconnect_seconds link.standby_seconds"),
    (2**32 - 1, "train.steps train.warmup train.muon_warmup train.checkpoint_every train.validate_every"),
    (10**15, "data.max_tokens"),
    (2**32, "data.buffer"),
)
"""The largest values, far beyond what anyone trains: a slip of the finger is refused before a loop or an allocation meets it."""
LARGEST_MARKED = 2**31 - 1
"""Most tokens of a step of which only some count in the loss."""
LARGEST_STEP = 2**32
"""Most tokens of a step."""
LIMITS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "at least 1",
        lambda value: value >= 1,
        "model.vocabulary model.width model.layers model.heads model.kv_heads model.head_dim model.ffn model.context",
    ),
    ("at least 1", lambda value: value >= 1, "model.rope_context model.window"),
    ("above 0", lambda value: 0 < value < math.inf, "model.rope_factor model.rope_slow model.rope_fast model.rope_attention_factor"),
    ("at least 0", lambda value: 0 <= value < math.inf, "model.logit_cap adapter.rank"),
    ("above 0", lambda value: 0 < value < math.inf, "adapter.alpha train.embedding_rate train.head_rate train.vector_rate"),
    ("at least 1", lambda value: value >= 1, "data.max_tokens data.buffer train.steps train.batch train.validation_sequences"),
    ("at least 1", lambda value: value >= 1, "pipeline.stages pipeline.microbatches replicas.count"),
    ("above 0", lambda value: 0 < value < math.inf, "model.rope_theta model.norm_eps train.seconds train.rate train.muon_rate train.eps"),
    (
        "above 0",
        lambda value: 0 < value < math.inf,
        "link.pace_mbps link.ping_seconds link.silent_seconds link.reconnect_seconds link.standby_seconds train.stuck_seconds",
    ),
    ("at least 0", lambda value: 0 <= value < math.inf, "model.free_layers train.clip train.weight_decay train.warmup train.threads"),
    ("at least 0", lambda value: value >= 0, "train.checkpoint_every train.validate_every train.muon_warmup"),
    (
        "at least 0 and below 1",
        lambda value: 0 <= value < 1,
        "model.dropout model.output_dropout adapter.dropout train.beta1 train.beta2 train.ema",
    ),
    ("between 0 and 1", lambda value: 0 <= value <= 1, "train.decay train.floor"),
    (f"between 0 and {LARGEST_SEED}", lambda value: 0 <= value <= LARGEST_SEED, "seed"),
)
"""What a number must be, the test for it, and the fields it goes for."""


def check_numbers(config: RunConfig) -> None:
    """Refuse numbers that mean nothing, and sizes that no machine has."""
    for text, holds, names in LIMITS:
        for name in names.split():
            value = attrgetter(name)(config)
            if value is not None and not holds(value):
                raise ValueError(f"{name} is {value}; set --{name} to a value that is {text}")
    for largest, names in LARGEST:
        for name in names.split():
            value = attrgetter(name)(config)
            if value is not None and value > largest:
                raise ValueError(f"{name} is {value:,}; set --{name} to at most {largest:,}")
    model, tokens = config.model, config.train.batch * config.model.context
    if tokens > LARGEST_STEP:
        raise ValueError(
            f"train.batch {config.train.batch:,} and model.context {model.context:,} make {tokens:,} tokens per step; "
            f"choose sizes that make at most {LARGEST_STEP:,}"
        )
    if model.free_layers is not None and model.free_layers > model.layers:
        raise ValueError(f"model.free_layers is {model.free_layers}, the model has {model.layers} layers; choose 0 to {model.layers}")
    if model.separator is not None and not 0 <= model.separator < model.vocabulary:
        raise ValueError(f"model.separator is {model.separator}; it is one of the tokens, 0 to {model.vocabulary - 1}")
    if config.data.marked and tokens > LARGEST_MARKED:
        raise ValueError(
            f"train.batch and model.context make {tokens:,} tokens per step; with data.loss completions choose at most {LARGEST_MARKED:,}"
        )
    if config.memory.budget is not None:
        read_size(config.memory.budget)


def check_batch(config: RunConfig) -> None:
    """Refuse a batch that cannot be shared out."""
    pipeline, batch = config.pipeline, config.train.batch
    if batch % config.replicas.count:
        choice = near_divisors(batch, config.replicas.count)
        raise ValueError(f"replicas.count is {config.replicas.count}, which does not divide train.batch {batch}; choose {choice}")
    share, choice = config.replica_batch, near_divisors(config.replica_batch, pipeline.microbatches)
    if share % pipeline.microbatches and config.replicas.count > 1:
        whose = f"a replica's share of train.batch, {share}"
        raise ValueError(f"pipeline.microbatches is {pipeline.microbatches}, which does not divide {whose}; choose {choice}")
    if batch % pipeline.microbatches:
        raise ValueError(f"pipeline.microbatches is {pipeline.microbatches}, which does not divide train.batch {batch}; choose {choice}")


def check_link(config: RunConfig) -> None:
    """Refuse a line that does not exist."""
    find_profile(config.link.profile)
    if config.pipeline.mode == "inprocess" and config.link.profile != "open":
        raise ValueError(
            f"link.profile is {config.link.profile}, but with pipeline.mode inprocess there is no link between stages; "
            "add --pipeline.mode workers, or use --link.profile open"
        )


def check_workers(config: RunConfig) -> None:
    """Refuse a model that separate workers cannot hold."""
    if config.pipeline.mode == "workers" and config.model.tied_head and config.pipeline.stages > 1:
        raise ValueError(
            "model.tied_head shares a matrix between the first and the last stage, which separate workers cannot; "
            "use --pipeline.mode inprocess, or untie the head"
        )


def check_replicas(config: RunConfig) -> None:
    """Refuse what does not go with several copies of the pipeline."""
    if config.replicas.count == 1:
        return
    if config.pipeline.mode == "inprocess":
        raise ValueError(
            f"replicas.count is {config.replicas.count}, but with pipeline.mode inprocess there is one process and one copy; "
            "add --pipeline.mode workers"
        )
    if config.memory.budget is not None:
        raise ValueError(
            f"memory.budget is {config.memory.budget} and replicas.count {config.replicas.count}: what an exchange keeps and sends is not "
            "planned for; leave one of them out"
        )
