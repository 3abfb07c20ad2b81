"""Which device a process takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from thinwire.util import device as devices
from thinwire.util.device import choose_device


def with_cards(monkeypatch, **counts: int) -> list[int]:
    """Let torch have so many cards of each kind; return what `set_device` is told."""
    told: list[int] = []

    def module(kind: str) -> SimpleNamespace:
        if kind not in counts:
            raise RuntimeError(f"no module {kind}")
        count = counts[kind]
        return SimpleNamespace(is_available=lambda: count > 0, device_count=lambda: count, set_device=told.append)

    monkeypatch.setattr(torch, "get_device_module", module)
    return told


def test_auto_takes_the_first_kind_that_is_there(monkeypatch):
    for counts, wanted in (({}, "cpu"), ({"mps": 1}, "mps:0"), ({"xpu": 2, "mps": 1}, "xpu:0"), ({"cuda": 1, "xpu": 1}, "cuda:0")):
        with_cards(monkeypatch, **counts)
        assert choose_device("auto") == torch.device(wanted)


def test_the_workers_of_a_machine_take_one_card_each(monkeypatch):
    told = with_cards(monkeypatch, cuda=3)
    assert [choose_device("cuda", worker).index for worker in range(5)] == [0, 1, 2, 0, 1] == told
    assert [choose_device("cuda:2", worker).index for worker in range(3)] == [2, 2, 2]


@pytest.mark.parametrize("wanted", ["cuda", "cuda:1", "xpu", "meta"])
def test_what_is_not_there_is_refused_with_what_is(monkeypatch, wanted):
    with_cards(monkeypatch, mps=1, **({"cuda": 1} if wanted == "cuda:1" else {}))
    monkeypatch.setattr(devices.torch.accelerator, "current_accelerator", lambda: None)
    with pytest.raises(ValueError, match=f"device '{wanted}' is not available .* available: .*mps:0, cpu"):
        choose_device(wanted)
    with pytest.raises(ValueError, match="device 'abacus' is not known"):
        choose_device("abacus")
