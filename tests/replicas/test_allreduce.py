"""The mean over replicas: exact or within the bounds of its packing, the same bits everywhere, on any graph."""

from __future__ import annotations

import pytest
import torch

from thinwire.bits.packing import make_packing
from thinwire.config.options import options_from_spec
from thinwire.config.sections import ReplicasConfig, RunConfig
from thinwire.replicas.allreduce import mean
from thinwire.replicas.exchange import make_exchange
from thinwire.testing.together import together


def numbers(replica: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(replica)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in ((7, 5), (3,), (2, 3, 4), (1, 9))]


@pytest.mark.parametrize("graph", ["complete", "ring", "torus", "0-1,1-2,2-3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_is_exact_and_the_same_everywhere(graph, dtype):
    results = together(4, lambda peers: mean(peers, numbers(peers.index, dtype)), graph)
    expected = [torch.stack(group).mean(0) for group in zip(*(numbers(replica, dtype) for replica in range(4)), strict=True)]
    for tensors in results:
        for found, first, wanted in zip(tensors, results[0], expected, strict=True):
            assert torch.equal(found, first)
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_bytes_are_those_of_two_shots():
    """Each value leaves a replica once as a share and comes back once as a sum: 2 (R - 1) / R of the whole."""

    def task(peers):
        mean(peers, [torch.zeros(8, 16)])
        return peers.sent

    assert together(4, task) == [2 * 3 * 8 * 16 * 4 // 4] * 4


def test_larger_messages_than_a_wire_holds_do_not_hang():
    results = together(2, lambda peers: mean(peers, [torch.full((2048, 1024), float(peers.index))]))
    assert all(torch.equal(tensors[0], torch.full((2048, 1024), 0.5)) for tensors in results)


LARGE = (128, 1024)
"""Rows long enough for the scale of a row to be less than 1 % of it."""


def large(replica: int) -> torch.Tensor:
    return torch.randn(LARGE, generator=torch.Generator().manual_seed(replica))


def average(packing: str, graph: str = "complete") -> list[tuple[torch.Tensor, int]]:
    """Return the mean of four matrices and the bytes sent for it, as each replica sees them."""

    def task(peers):
        (found,) = mean(peers, [large(peers.index)], make_packing(packing))
        return found, peers.sent

    return together(4, task, graph)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("packing", ["bf16", "int8", "zfp8", "zfp12"])
def test_a_lossy_packing_loses_at_most_twice_what_it_loses_once(packing):
    if packing.startswith("zfp"):
        pytest.importorskip("zfpy")
    exact = torch.stack([large(replica) for replica in range(4)]).mean(0)
    coder = make_packing(packing)
    once = relative(coder.unpack(coder.pack([exact]), [exact], 0)[0], exact)
    results = average(packing)
    assert all(torch.equal(found, results[0][0]) for found, _ in results)
    assert once < relative(results[0][0], exact) <= 2 * once


@pytest.mark.parametrize("packing", ["fp32", "lossless"])
def test_a_packing_without_loss_is_the_plain_mean(packing):
    exact = torch.stack([large(replica) for replica in range(4)]).mean(0)
    for found, _ in average(packing):
        torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("graph", ["ring", "0-1,1-2,1-3"])
@pytest.mark.parametrize("packing", ["int8", "lossless"])
def test_packed_means_are_the_same_bits_on_any_graph(packing, graph):
    exact = torch.stack([large(replica) for replica in range(4)]).mean(0)
    results = average(packing, graph)
    assert all(torch.equal(found, results[0][0]) for found, _ in results)
    assert relative(results[0][0], exact) < 0.03


@pytest.mark.parametrize("packing, rate", [("bf16", 16), ("int8", 8), ("zfp8", 8), ("zfp12", 12), ("zfp16", 16)])
def test_bytes_between_replicas_are_those_of_the_rate(packing, rate):
    if packing.startswith("zfp"):
        pytest.importorskip("zfpy")
    rows, columns = LARGE
    whole = 2 * 3 * rows // 4 * columns * 4
    extra = {"int8": 2 * 3 * rows // 4 * 4, "bf16": 0}.get(packing, 2 * 3)  # a scale per row; a byte per message of zfp
    for _, sent in average(packing):
        assert sent == whole * rate // 32 + extra
        assert whole / sent == pytest.approx(32 / rate, rel=0.01)


@pytest.mark.parametrize("graph", ["complete", "ring"])
def test_what_went_in_is_what_came_out_and_what_was_lost(graph):
    def task(peers):
        given = numbers(peers.index, torch.float64)
        lost = [torch.zeros_like(tensor) for tensor in given]
        return given, mean(peers, given, make_packing("int8"), lost), lost

    results = together(4, task, graph)
    for place in range(4):
        given, found, lost = (torch.stack([result[part][place] for result in results]).sum(0) for part in range(3))
        assert lost.abs().max() > 1e-4
        torch.testing.assert_close(given, found + lost, rtol=0, atol=1e-14)


def exchange(text: str, count: int = 2) -> RunConfig:
    return RunConfig(replicas=ReplicasConfig(count=count), exchange=options_from_spec("exchange", text))


@pytest.mark.parametrize("text, least, most", [("allreduce", 0, 1e-6), ("allreduce:packing=bf16", 1e-4, 1e-2)])
def test_the_method_packs_as_it_is_told(text, least, most):
    def task(peers):
        named = dict(zip("abcd", numbers(peers.index, torch.float32), strict=True))
        method = make_exchange(exchange(text), peers, named)
        method.gradients(named, 0)
        return named, method.meets(0)

    results = together(2, task)
    for name, tensor in results[0][0].items():
        exact = torch.stack([dict(zip("abcd", numbers(replica, torch.float32), strict=True))[name] for replica in range(2)]).mean(0)
        assert torch.equal(tensor, results[1][0][name])
        assert least <= relative(tensor, exact) <= most
    assert results[0][1]


def test_an_unknown_packing_is_refused_before_anything_is_sent():
    with pytest.raises(ValueError, match="unknown packing 'int7'; choose"):
        together(2, lambda peers: make_exchange(exchange("allreduce:packing=int7"), peers, {}))
