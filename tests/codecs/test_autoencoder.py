"""The learned linear boundary: exact at full width, linear, narrow both ways, trained by the task alone."""

from __future__ import annotations

import pytest
import torch

from helpers import TINY, gradients, make_pipeline, parameters, random_ids, relative
from thinwire.codecs.autoencoder import AutoencoderEntry, AutoencoderExit
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.model.ends import Context
from thinwire.model.subspace.basis import random_basis

IDS, CONTEXT = torch.zeros(3, 5, dtype=torch.int64), Context(0, torch.arange(3))


def values(seed: int) -> torch.Tensor:
    return torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(seed))


def test_full_width_with_an_orthonormal_pair_reproduces_the_stream():
    exit, entry = AutoencoderExit(32, 32, torch.float32), AutoencoderEntry(32, 32, torch.float32)
    basis_DD = random_basis(32, 32, 1).float()
    with torch.no_grad():
        exit.encode.weight.copy_(basis_DD)
        entry.decode.weight.copy_(basis_DD.T)
    assert relative(entry(exit(values(0), IDS, CONTEXT), IDS, CONTEXT), values(0)) < 1e-5


def test_encoding_a_sum_is_summing_the_encodings():
    exit = AutoencoderExit(32, 7, torch.float32)
    apart = sum(exit(values(seed), IDS, CONTEXT)[0] for seed in range(4))
    together = exit(sum(values(seed) for seed in range(4)), IDS, CONTEXT)[0]
    assert together.shape == (3, 5, 7)
    assert relative(apart, together) < 1e-5


def test_matrices_start_xavier_uniform():
    exit, entry = AutoencoderExit(256, 64, torch.float32), AutoencoderEntry(256, 64, torch.float32)
    limit = (6 / (256 + 64)) ** 0.5
    for weight in (exit.encode.weight, entry.decode.weight):
        assert weight.abs().max() <= limit and weight.std().item() == pytest.approx(limit / 3**0.5, rel=0.02)


def test_both_directions_are_narrow():
    spec = make_codec(codec_defaults("autoencoder", channels=5), TINY).spec(3, 4)
    assert spec.bytes_per_token("forward") == spec.bytes_per_token("backward") == 5 * 2
    assert make_pipeline("autoencoder", channels=5).boundaries[0].spec.tensors[0].shape == (2, TINY.context, 5)


def test_encoder_and_decoder_learn_from_the_task():
    pipeline = make_pipeline("autoencoder", stages=3)
    pipeline.step(random_ids(), 0, 0)
    found = gradients(pipeline)
    for name in ("exits.2.encode.weight", "entries.2.decode.weight", "exits.3.encode.weight", "entries.3.decode.weight"):
        assert found[name].isfinite().all() and found[name].any(), name


def test_ends_start_from_the_seed():
    first, second = parameters(make_pipeline("autoencoder")), parameters(make_pipeline("autoencoder"))
    assert torch.equal(first["exits.2.encode.weight"], second["exits.2.encode.weight"])
    assert torch.equal(first["entries.2.decode.weight"], second["entries.2.decode.weight"])


@pytest.mark.parametrize("channels", [0, 33])
def test_other_widths_are_refused(channels):
    with pytest.raises(ValueError, match=rf"codec.channels is {channels}; it can be 1 to the model width, 32"):
        make_codec(codec_defaults("autoencoder", channels=channels), TINY)
