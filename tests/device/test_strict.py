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
        (there * 2).softmax(0).sum().backward if there.requires_grad else None
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
