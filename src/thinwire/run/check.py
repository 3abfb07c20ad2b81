"""Refuse settings that cannot work, before anything starts, and settle what they leave open. Knows no files and no command line.

What can be said from the settings alone is in `config/limits.py`. What a codec, an exchange or an architecture refuses (a rank above the
width, say) it refuses itself.
"""

from __future__ import annotations

import os
from dataclasses import replace
from decimal import Decimal

from thinwire.config.limits import check_batch, check_link, check_numbers, check_replicas, check_workers
from thinwire.config.registry import CODECS
from thinwire.config.sections import RunConfig
from thinwire.data.weights import parse_mixture
from thinwire.model.adapter_targets import target_layers
from thinwire.model.architecture import find_architecture
from thinwire.model.cut import constrained_layers, cut_layers
from thinwire.replicas.graph import make_graph

LARGEST_MODEL = 10**13
"""Most weights of a model."""


def check(config: RunConfig) -> None:
    """Raise ValueError for the first setting that cannot work."""
    check_numbers(config)
    check_device(config)
    check_architecture(config)
    ranges = cut_layers(config.model.layers, config.pipeline.stages, config.pipeline.split)
    check_batch(config)
    check_link(config)
    check_codec(config, ranges)
    check_adapter(config)
    check_workers(config)
    check_replicas(config)
    if config.replicas.count > 1:
        make_graph(config.replicas.graph, config.replicas.count)
        config.exchange.check(config)


def check_device(config: RunConfig) -> None:
    """Refuse a device that torch has no name for; whether it is here shows when it is used."""
    import torch  # not at the top: most of the checks do without it

    try:
        torch.device("cpu" if config.device == "auto" else config.device)
    except RuntimeError:
        raise ValueError(f"device is {config.device!r}; choose auto, cpu, cuda, cuda:1, xpu, mps, or another device of torch") from None


def check_architecture(config: RunConfig) -> None:
    """Refuse a model that is too large, or whose parts do not fit each other."""
    model = config.model
    architecture = find_architecture(model.architecture)
    if (weights := architecture.count(model, model.layers)) > LARGEST_MODEL:
        raise ValueError(
            f"model.width {model.width:,}, model.ffn {model.ffn:,} and model.layers {model.layers:,} make {weights:,} weights; "
            f"choose sizes that make at most {LARGEST_MODEL:,}"
        )
    if model.fused_loss and model.logit_cap:
        raise ValueError(
            f"model.fused_loss computes head and loss together, and model.logit_cap {model.logit_cap} stands between them; leave one out"
        )
    architecture.check(model)


def check_codec(config: RunConfig, ranges: list[range]) -> None:
    """Refuse a codec that does not go with the model or its cut."""
    from thinwire.codecs.build import make_codec  # not at the top: it imports torch

    codec = make_codec(config.codec, config.model)
    if config.model.separator is not None and len(ranges) > 1 and not codec.by_token:
        raise ValueError(
            f"model.separator keeps documents apart, but the codec {config.codec.name!r} looks at a whole sequence at once; choose a codec "
            "that sends each token by itself, or leave model.separator out"
        )
    if codec.constrains:
        constrained_layers(config.model, ranges)
    if len(ranges) > 1 and getattr(config.codec, "from_layer", 0) > ranges[-1].start:
        raise ValueError(
            f"codec.from_layer is {config.codec.from_layer}, the last boundary is before layer {ranges[-1].start}, so nothing would "
            f"be compressed; choose 0 to {ranges[-1].start}"
        )


def check_adapter(config: RunConfig) -> None:
    """Refuse an adapter for layers that there are not, or beside what it does not go with."""
    if not config.adapter.rank:
        return
    target_layers(config.model, config.adapter)
    if CODECS.load(config.codec.name).constrains:
        raise ValueError(
            f"adapter.rank is {config.adapter.rank}, but the codec {config.codec.name!r} holds what is written into the stream as "
            "coordinates, and frozen weights are not in its subspace; choose --codec.name quantize, hadamard, lossless or dense, or train "
            "all weights (--adapter.rank 0)"
        )
    if config.replicas.count > 1 and config.exchange.name == "ist":
        raise ValueError(
            f"adapter.rank is {config.adapter.rank}, but the exchange ist deals out heads and neurons, and all of them are frozen; choose "
            "another exchange, such as allreduce"
        )


def resolve(config: RunConfig) -> RunConfig:
    """Write down where the data is, wherever the run goes on, and how many layers are free: then another cut is the same network."""

    data = config.data
    config = replace(config, data=replace(data, source=absolute_sources(data.source), tokenizer=absolute(data.tokenizer, "train")))
    if config.model.free_layers is not None or not CODECS.load(config.codec.name).constrains:
        return config
    last = cut_layers(config.model.layers, config.pipeline.stages, config.pipeline.split)[-1]
    return replace(config, model=replace(config.model, free_layers=len(last)))


def absolute(source: str, name: str) -> str:
    """Return a path or glob of data from the root on; a name that stands for data, or is of the Hub, stays."""
    return source if source == name or source.startswith("hf:") else os.path.abspath(os.path.expanduser(source))


def absolute_sources(source: str) -> str:
    """Return the paths of a source, or of several with weights, from the root on."""
    sources = parse_mixture(source)
    if len(sources) == 1:
        return absolute(source, "stdlib")
    return ",".join(f"{absolute(name, 'stdlib')}:{Decimal(weight.numerator) / weight.denominator:f}" for name, weight in sources)
