"""Make a codec from its options: with `quantize` behind it where they give bits, left off where they say so."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from thinwire.codecs.base import Codec, CodecOptions, LossyOptions
from thinwire.codecs.chain import Chain
from thinwire.codecs.gated import Gated
from thinwire.codecs.quantize import Quantize, QuantizeOptions
from thinwire.config.registry import CODECS
from thinwire.config.sections import ModelConfig


def make_codec(options: CodecOptions, model: ModelConfig, *, seed: int = 0, compute: torch.dtype = torch.float32) -> Codec:
    """Make the codec that the options describe."""
    if options.bits is None and (options.backward_bits is not None or options.rounding != "nearest"):
        given = "rounding" if options.backward_bits is None else "backward_bits"
        raise ValueError(
            f"codec.{given} is {getattr(options, given)}, but nothing is quantised; set codec.bits, or leave codec.{given} out"
        )
    codec = CODECS.load(options.name)(options, model, seed=seed, compute=compute)
    if options.bits is not None and not codec.owns_bits:
        shared = {entry.name: getattr(options, entry.name) for entry in dataclasses.fields(CodecOptions)}
        codec = Chain(codec, Quantize(QuantizeOptions(**shared | {"name": "quantize"}), model, seed=seed, compute=compute))
    if isinstance(options, LossyOptions) and (options.warmup or options.from_layer):
        codec = Gated(codec, options)
    return codec


def codec_defaults(name: str, **overrides: Any) -> CodecOptions:
    """Return a codec's default options, with overrides."""
    return dataclasses.replace(CODECS.load(name).Options(name=name), **overrides)
