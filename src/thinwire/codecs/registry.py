"""Find codecs by name: ours in one dict, third parties' through the entry point group `thinwire.codecs`."""

from __future__ import annotations

import dataclasses
from importlib import import_module

import torch

from thinwire.codecs.base import Codec, LossyOptions, Options
from thinwire.codecs.chain import Chain
from thinwire.codecs.gated import Partly
from thinwire.codecs.quantize import Quantize, QuantizeOptions
from thinwire.config.catalog import CODECS as BUILT_IN
from thinwire.config.catalog import codec_names as names
from thinwire.config.catalog import third_party_codecs
from thinwire.config.sections import ModelConfig


def find(name: str) -> type[Codec]:
    """Return the codec class of that name, importing only its own module."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return getattr(import_module(module), attribute)
    for point in third_party_codecs().select(name=name):
        return point.load()
    raise ValueError(f"unknown codec {name!r}; choose one of {', '.join(names())}")


def build(options: Options, model: ModelConfig, *, seed: int = 0, compute: torch.dtype = torch.float32) -> Codec:
    """Make the codec that the options describe, with `quantize` behind it where they give bits, left off where they say so."""
    if options.bits is None and (options.backward_bits is not None or options.rounding != "nearest"):
        given = "rounding" if options.backward_bits is None else "backward_bits"
        raise ValueError(
            f"codec.{given} is {getattr(options, given)}, but nothing is quantised; set codec.bits, or leave codec.{given} out"
        )
    codec = find(options.name)(options, model, seed=seed, compute=compute)
    if options.bits is not None and not codec.owns_bits:
        shared = {entry.name: getattr(options, entry.name) for entry in dataclasses.fields(Options)}
        codec = Chain(codec, Quantize(QuantizeOptions(**shared | {"name": "quantize"}), model, seed=seed, compute=compute))
    if isinstance(options, LossyOptions) and (options.warmup or options.from_layer):
        codec = Partly(codec, options)
    return codec


def defaults(name: str, **overrides) -> Options:
    """Return a codec's default options, with overrides."""
    return dataclasses.replace(find(name).Options(name=name), **overrides)
