"""The strict device itself: what it refuses, and what it counts."""

from __future__ import annotations

import threading

import pytest
import torch


def test_it_refuses_what_only_works_on_the_cpu(strict):
    there = torch.ones(3, 4).to("strict")
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(3, 4)
    with pytest.raises(RuntimeError, match="beside tensors on the strict device"):
        there.masked_fill_(torch.ones(3, 4, dtype=torch.bool), 0.0)
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    for make in (there.double, lambda: torch.zeros(2, dtype=torch.float64, device="strict")):
        with pytest.raises(TypeError, match="no float64"):
            make()
    with pytest.raises(RuntimeError, match="strict:0 and strict:1"):
        there + there.cpu().to("strict:1")


def test_it_counts_what_a_host_waits_for_and_nothing_else(strict):
    there = torch.arange(6.0).to("strict")
    with strict.watched() as found:
        (there * 2).softmax(0).sum()
        there.view(2, 3).T.contiguous().topk(1)
    assert not found
    for wait in (lambda: float(there.sum()), there.cpu, lambda: there.masked_select(there > 2), lambda: there[there > 2], there.tolist):
        with strict.watched() as found:
            wait()
        assert sum(found.values()) == 1, found


def test_a_copy_to_pinned_memory_is_done_when_it_was_waited_for(strict):
    there, here = torch.arange(5.0).to("strict"), torch.zeros(5, pin_memory=True)
    with strict.watched() as found:
        here.copy_(there, non_blocking=True)
        assert not found and here.isnan().all(), "a card has not copied yet"
        torch.accelerator.synchronize()
    assert here.tolist() == [0, 1, 2, 3, 4] and sum(found.values()) == 1


def test_gradients_are_computed_in_a_thread_of_the_device(strict):
    seen = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return values * 2

        @staticmethod
        def backward(ctx, gradient):
            seen.append(threading.get_ident())
            return gradient * 2

    Spy.apply(torch.ones(3).to("strict").requires_grad_()).sum().backward()
    assert seen and seen[0] != threading.get_ident()


def test_views_share_memory_and_outputs_are_resized(strict):
    there = torch.zeros(2, 3).to("strict")
    there.view(-1)[4:].fill_(7)
    assert there.tolist() == [[0, 0, 0], [0, 7, 7]]
    out = torch.empty(0, device="strict")
    torch.add(there, 1, out=out)
    assert out.shape == (2, 3) and out[1, 2].item() == 8
    there.untyped_storage().resize_(0)
    there.untyped_storage().resize_(24)
    assert there.fill_(2).sum().item() == 12


def test_it_is_chosen_by_name_only(strict):
    from thinwire.util.device import choose_device

    assert choose_device("auto") == torch.device("cpu")
    try:
        assert [choose_device("strict", worker).index for worker in range(3)] == [0, 1, 0]
        assert choose_device("strict:1") == torch.device("strict:1")
        assert torch.accelerator.current_device_index() == 1
    finally:
        torch.accelerator.set_device_index(0)
    with pytest.raises(ValueError, match="available: strict:0, strict:1, cpu"):
        choose_device("strict:2")


@pytest.mark.parametrize("bits", [8, 4, 3, 2, 1])
def test_codes_are_packed_on_it(strict, bits):
    from thinwire.bits.codes import pack_codes

    codes = torch.randint(0, 2**bits, (3, 37), generator=torch.Generator().manual_seed(bits)).to(torch.bfloat16)
    with strict.watched() as found:
        data = pack_codes(codes.to("strict"), bits)
    assert data == pack_codes(codes, bits) and sum(found.values()) == 1
