"""The residual bottleneck: against its equations written out in one graph, and the size of the stream it starts with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from helpers import TINY, gradients, make_pipeline, random_ids, relative
from thinwire.codecs.bottleneck import BottleneckEntry
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.model.block import Dropout, Pass
from thinwire.model.ends import Context
from thinwire.pipeline.inprocess import Pipeline

CONTEXT = Context(0, torch.arange(3))


def written_out(pipeline: Pipeline, ids_BT1: Tensor) -> Tensor:
    """Return the loss of the whole model in one graph, without ends and bytes."""
    stream = pipeline.stages[0].embedding(ids_BT1[:, :-1])
    for stage in pipeline.stages:
        each = Pass(stage.tables, Dropout(0, 0, torch.arange(len(ids_BT1)), False))
        for layer in stage.plan.layers:
            block = stage.layers[str(layer)]
            if stage.plan.last or layer != stage.plan.layers.stop - 1:
                stream = block(stream, lambda whole: whole, each)
                continue
            stream = stream + block.attention.output(block.attention.mixed(block.attention_norm(stream), each))
            hidden = block.ffn_norm(stream)
            written = (functional.silu(hidden @ block.ffn.gate.weight.T) * (hidden @ block.ffn.up.weight.T)) @ block.ffn.down.weight.T
            sent = written + stream[..., : written.shape[-1]]
            weight_DK = pipeline.stages[stage.plan.index + 1].entries[str(layer + 1)].widen.weight
            wide = sent @ weight_DK.T
            stream = torch.cat((wide[..., : sent.shape[-1]] + sent, wide[..., sent.shape[-1] :]), dim=-1)
    last = pipeline.stages[-1]
    return functional.cross_entropy(last.head(last.norm(stream)).flatten(0, 1), ids_BT1[:, 1:].flatten())


@pytest.mark.parametrize("channels", [1, 7, 32])
def test_gradients_are_those_of_one_graph(channels):
    pipeline, ids = make_pipeline("bottleneck", stages=3, channels=channels), random_ids()
    loss = written_out(pipeline, ids)
    loss.backward()
    wanted = {name: gradient.clone() for name, gradient in gradients(pipeline).items()}
    for stage in pipeline.stages:
        stage.zero_grad()
    assert pipeline.step(ids, 0, 0) == pytest.approx(loss.item(), rel=1e-12)
    found = gradients(pipeline)
    assert found.keys() == wanted.keys() and {"entries.2.widen.weight", "entries.3.widen.weight"} < found.keys()
    for name, gradient in found.items():
        assert relative(gradient, wanted[name]) < 1e-10, name


def test_the_last_block_writes_so_many_channels():
    pipeline = make_pipeline("bottleneck", stages=3, channels=7)
    shapes = {name: tuple(p.shape) for stage in pipeline.stages for name, p in stage.named_parameters()}
    assert [shapes[f"layers.{layer}.ffn.down.weight"][0] for layer in range(4)] == [32, 7, 7, 32]
    assert [boundary.spec.tensors[0].shape[-1] for boundary in pipeline.boundaries] == [7, 7]


def test_full_width_without_a_matrix_is_the_identity():
    entry = BottleneckEntry(32, 32, torch.float32)
    torch.nn.init.zeros_(entry.widen.weight)
    sent = torch.randn(3, 5, 32)
    assert torch.equal(entry((sent,), torch.zeros(3, 5), CONTEXT), sent)


@pytest.mark.parametrize("channels", [4, 64, 255, 256])
def test_the_stream_starts_as_large_as_it_was_sent(channels):
    torch.manual_seed(0)
    entry, sent = BottleneckEntry(256, channels, torch.float32), torch.randn(64, 32, channels)
    received = entry((sent,), torch.zeros(64, 32), CONTEXT)
    assert torch.equal(received[..., :channels], sent)
    assert received.square().mean().sqrt().item() == pytest.approx(1, rel=0.1)


def test_it_trains():
    pipeline = make_pipeline("bottleneck", dtype="fp32", channels=8)
    optimizer = torch.optim.AdamW([p for stage in pipeline.stages for p in stage.parameters()], lr=3e-3)
    losses = []
    for step in range(30):
        losses.append(pipeline.step(random_ids(), step, 0))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("channels", [0, 33])
def test_other_widths_are_refused(channels):
    with pytest.raises(ValueError, match=rf"codec.channels is {channels}; it can be 1 to the model width, 32"):
        make_codec(codec_defaults("bottleneck", channels=channels), TINY)
