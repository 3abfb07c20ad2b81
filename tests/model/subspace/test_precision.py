"""With `--train.dtype bf16` the stream is still read in fp32: what the frozen features would swallow in bf16 is the dynamic part."""

from __future__ import annotations

import pytest
import torch

from helpers import TINY, make_pipeline, random_ids, relative


@pytest.mark.parametrize("end", ["read", "open"])
@pytest.mark.parametrize("cache", [64.0, 0.0], ids=["table", "hash"])
def test_autocast_does_not_round_a_read(cache, end):
    stream = make_pipeline("subspace", rank=6, dtype="fp32", fixed_cache_mb=cache).stages[-1].stream
    ids_BT = random_ids()[:, :-1]
    coordinates = 0.05 * torch.randn(*ids_BT.shape, 6, generator=torch.Generator().manual_seed(1))
    coordinates.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        hidden_BTD = getattr(stream, end)(coordinates, stream.static(ids_BT))
    dynamic_BTD = coordinates.detach().double() @ stream.basis_DK.double().T
    assert hidden_BTD.dtype == torch.float32
    assert relative(hidden_BTD.double() - stream.fixed(ids_BT).double(), dynamic_BTD) < 1e-4  # 0.3 in bf16
    gradient_BTD = torch.randn(*ids_BT.shape, TINY.width, generator=torch.Generator().manual_seed(2))
    hidden_BTD.backward(gradient_BTD)
    assert relative(coordinates.grad.double(), gradient_BTD.double() @ stream.basis_DK.double()) < 1e-6
