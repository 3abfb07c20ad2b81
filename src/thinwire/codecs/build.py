"""Make a codec from its options: with `quantize` or entropy coding behind it where they say so, left off where they say so."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from thinwire.codecs.base import Codec, CodecOptions, LossyOptions
from thinwire.codecs.chain import Chain
from thinwire.codecs.entropy import Entropy
from thinwire.codecs.gated import Gated
from thinwire.codecs.quantize import Quantize, QuantizeOptions
from thinwire.config.registry import CODECS
from thinwire.config.sections import ModelConfig

ENTROPY_ONLY = ("rate", "backward_rate", "dead_zone", "rate_penalty", "sample", "boundary_rates", "dither", "steer")
"""Options that say something only where payloads are entropy-coded."""


def make_codec(options: CodecOptions, model: ModelConfig, *, seed: int = 0, compute: torch.dtype = torch.float32) -> Codec:
    """Make the codec that the options describe."""
    if options.bits is None and not options.entropy and (options.backward_bits is not None or options.rounding != "nearest"):
        given = "rounding" if options.backward_bits is None else "backward_bits"
        raise ValueError(
            f"codec.{given} is {getattr(options, given)}, but nothing is quantised; set codec.bits, or leave codec.{given} out"
        )
    refuse_idle(options)
    codec = CODECS.load(options.name)(options, model, seed=seed, compute=compute)
    if options.entropy:
        codec = entropy_coded(codec)
    elif options.bits is not None and not codec.owns_bits:
        shared = {entry.name: getattr(options, entry.name) for entry in dataclasses.fields(CodecOptions)}
        codec = Chain(codec, Quantize(QuantizeOptions(**shared | {"name": "quantize"}), model, seed=seed, compute=compute))
    if isinstance(options, LossyOptions) and (options.warmup or options.from_layer):
        codec = Gated(codec, options)
    return codec


def refuse_idle(options: CodecOptions) -> None:
    """Refuse options of entropy coding where there is none."""
    for entry in dataclasses.fields(CodecOptions):
        if entry.name in ENTROPY_ONLY and not options.entropy and getattr(options, entry.name) != entry.default:
            raise ValueError(
                f"codec.{entry.name} is {getattr(options, entry.name)}, but nothing is entropy-coded; set codec.entropy true, "
                f"or leave codec.{entry.name} out"
            )


def entropy_coded(codec: Codec) -> Codec:
    """Put entropy coding behind a codec that sends one tensor of values for each token."""
    shown = [spec.shape for spec in codec.spec(2, 3).tensors]
    if codec.owns_bits or len(shown) != 1 or shown[0][:2] != (2, 3) or len(shown[0]) != 3:
        raise ValueError(
            f"codec.entropy is true, but `{codec.options.name}` does not send a row of plain values for each token; "
            "choose dense, subspace, anchored, bottleneck, autoencoder or randomk, or leave codec.entropy out"
        )
    return Chain(codec, Entropy(codec.options, codec.model, shown[0][-1], seed=codec.seed, compute=codec.compute))


def codec_defaults(name: str, **overrides: Any) -> CodecOptions:
    """Return a codec's default options, with overrides."""
    return dataclasses.replace(CODECS.load(name).Options(name=name), **overrides)
