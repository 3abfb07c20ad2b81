"""What a layer launches at D = 4096 and T = 4096, counted on tensors without memory: nothing is computed."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.config.sections import ModelConfig
from thinwire.model.cut import StagePlan
from thinwire.model.ends import Context
from thinwire.model.stage import Stage

VIEWS = {"view", "t", "transpose", "expand", "slice", "unsqueeze", "squeeze", "detach", "alias", "_unsafe_view", "permute", "select"}
"""Operators that only look at memory in another way."""


class Launches(TorchDispatchMode):
    """Count operators that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket.__name__ not in VIEWS
        return function(*args, **(kwargs or {}))


def launches(codec: str, layers: int) -> int:
    """Count the launches of forward and backward of one microbatch in a stage of so many layers."""
    size = {"width": 4096, "heads": 32, "kv_heads": 8, "ffn": 11008, "context": 4096, "vocabulary": 32000}
    model = ModelConfig(layers=layers + 4, free_layers=1, **size)
    with torch.device("meta"):
        made = make_codec(codec_defaults(codec), model)
        stage = Stage(model, StagePlan(1, 3, range(1, 1 + layers)), made, model.layers - 1 if made.constrains else 0, 0)
        payload = tuple(torch.zeros(spec.shape, dtype=spec.dtype, requires_grad=True) for spec in made.spec(1, model.context).tensors)
        ids = torch.zeros(1, model.context + 1, dtype=torch.int64)
        with Launches() as found:
            output = stage(ids, payload, Context(0, torch.arange(1), True))
            torch.autograd.backward(output, [torch.zeros_like(tensor) for tensor in output])
    return found.count


@pytest.fixture(autouse=True)
def no_autocast(monkeypatch):
    """Leave autocast out, which tensors without memory do not have."""
    monkeypatch.setattr(torch, "autocast", lambda *given, **words: nullcontext())


def test_a_constrained_layer_launches_little_more_than_a_dense_one():
    few, many = ({codec: launches(codec, layers) for codec in ("dense", "subspace")} for layers in (1, 8))
    per_layer = {codec: (many[codec] - few[codec]) / 7 for codec in few}
    assert per_layer["dense"] > 50
    assert per_layer["subspace"] <= 1.2 * per_layer["dense"]
    assert many["subspace"] <= 1.2 * many["dense"], "the features of a microbatch are made once"
