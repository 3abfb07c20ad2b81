"""Refuse settings that cannot work, before anything starts: every message has the value, the limit and the fix.

Knows no files and no command line. What a codec refuses (a rank above the width, say) it refuses itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter

from thinwire.config.profiles import find_profile
from thinwire.config.sections import ModelConfig, RunConfig
from thinwire.model.architecture import find_architecture
from thinwire.model.cut import constrained_layers, cut_layers
from thinwire.replicas.graph import make_graph
from thinwire.util.sizes import near_divisors, read_size

LARGEST_SEED = 2**63 - 1
LARGEST: tuple[tuple[int, str], ...] = (
    (2**10, "train.threads pipeline.stages replicas.count"),
    (2**14, "model.layers"),
    (2**16, "model.heads model.kv_heads pipeline.microbatches"),
    (2**20, "model.width model.ffn train.batch train.validation_sequences"),
    (2**24, "model.vocabulary model.context"),
    (10**9, "train.seconds link.ping_seconds link.silent_seconds link.reconnect_seconds link.standby_seconds"),
    (2**32 - 1, "train.steps train.warmup train.checkpoint_every train.validate_every"),
    (10**15, "data.max_tokens"),
)
"""The largest values, far beyond what anyone trains: a slip of the finger is refused before a loop or an allocation meets it."""
LARGEST_MODEL = 10**13
"""Most weights of a model."""
LARGEST_STEP = 2**32
"""Most tokens of a step."""
LIMITS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "at least 1",
        lambda value: value >= 1,
        "model.vocabulary model.width model.layers model.heads model.kv_heads model.ffn model.context",
    ),
    ("at least 1", lambda value: value >= 1, "data.max_tokens train.steps train.batch train.validation_sequences"),
    ("at least 1", lambda value: value >= 1, "pipeline.stages pipeline.microbatches replicas.count"),
    ("above 0", lambda value: 0 < value < math.inf, "model.rope_theta model.norm_eps train.seconds train.rate train.muon_rate train.eps"),
    (
        "above 0",
        lambda value: 0 < value < math.inf,
        "link.pace_mbps link.ping_seconds link.silent_seconds link.reconnect_seconds link.standby_seconds train.stuck_seconds",
    ),
    ("at least 0", lambda value: 0 <= value < math.inf, "model.free_layers train.clip train.weight_decay train.warmup train.threads"),
    ("at least 0", lambda value: value >= 0, "train.checkpoint_every train.validate_every"),
    ("at least 0 and below 1", lambda value: 0 <= value < 1, "model.dropout model.output_dropout train.beta1 train.beta2"),
    ("between 0 and 1", lambda value: 0 <= value <= 1, "train.decay"),
    (f"between 0 and {LARGEST_SEED}", lambda value: 0 <= value <= LARGEST_SEED, "seed"),
)
"""What a number must be, the test for it, and the fields it goes for."""


def check(config: RunConfig) -> None:
    """Raise ValueError for the first setting that cannot work."""
    for text, holds, words in LIMITS:
        for word in words.split():
            value = attrgetter(word)(config)
            if value is not None and not holds(value):
                raise ValueError(f"{word} is {value}; set --{word} to a value that is {text}")
    check_sizes(config)
    check_model(config.model)
    check_pipeline(config)
    if config.memory.budget is not None:
        read_size(config.memory.budget)
    from thinwire.codecs.build import make_codec  # not at the top: it imports torch

    ranges = cut_layers(config.model.layers, config.pipeline.stages, config.pipeline.split)
    if make_codec(config.codec, config.model).constrains:
        constrained_layers(config.model, ranges)
    if len(ranges) > 1 and getattr(config.codec, "from_layer", 0) > ranges[-1].start:
        raise ValueError(
            f"codec.from_layer is {config.codec.from_layer}, the last boundary is before layer {ranges[-1].start}, so nothing would "
            f"be compressed; choose 0 to {ranges[-1].start}"
        )
    check_workers(config)
    check_replicas(config)


def check_sizes(config: RunConfig) -> None:
    """Refuse sizes that no machine has."""
    for largest, words in LARGEST:
        for word in words.split():
            value = attrgetter(word)(config)
            if value is not None and value > largest:
                raise ValueError(f"{word} is {value:,}; set --{word} to at most {largest:,}")
    model, tokens = config.model, config.train.batch * config.model.context
    if (weights := find_architecture(model.architecture).count(model, model.layers)) > LARGEST_MODEL:
        raise ValueError(
            f"model.width {model.width:,}, model.ffn {model.ffn:,} and model.layers {model.layers:,} make {weights:,} weights; "
            f"choose sizes that make at most {LARGEST_MODEL:,}"
        )
    if tokens > LARGEST_STEP:
        raise ValueError(
            f"train.batch {config.train.batch:,} and model.context {model.context:,} make {tokens:,} tokens per step; "
            f"choose sizes that make at most {LARGEST_STEP:,}"
        )


def check_model(model: ModelConfig) -> None:
    """Refuse a model whose parts do not fit each other."""
    find_architecture(model.architecture).check(model)
    if model.free_layers is not None and model.free_layers > model.layers:
        raise ValueError(f"model.free_layers is {model.free_layers}, the model has {model.layers} layers; choose 0 to {model.layers}")


def check_pipeline(config: RunConfig) -> None:
    """Refuse a cut, a batch or a link that this version cannot run."""
    pipeline, batch = config.pipeline, config.train.batch
    cut_layers(config.model.layers, pipeline.stages, pipeline.split)
    if batch % config.replicas.count:
        choice = near_divisors(batch, config.replicas.count)
        raise ValueError(f"replicas.count is {config.replicas.count}, which does not divide train.batch {batch}; choose {choice}")
    share, choice = config.replica_batch, near_divisors(config.replica_batch, pipeline.microbatches)
    if share % pipeline.microbatches and config.replicas.count > 1:
        whose = f"a replica's share of train.batch, {share}"
        raise ValueError(f"pipeline.microbatches is {pipeline.microbatches}, which does not divide {whose}; choose {choice}")
    if batch % pipeline.microbatches:
        raise ValueError(f"pipeline.microbatches is {pipeline.microbatches}, which does not divide train.batch {batch}; choose {choice}")
    find_profile(config.link.profile)
    if pipeline.mode == "inprocess" and config.link.profile != "open":
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
    """Refuse copies of the pipeline that could not reach or understand each other."""
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
    make_graph(config.replicas.graph, config.replicas.count)
    config.exchange.check(config)
