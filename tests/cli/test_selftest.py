"""`thinwire selftest`: what is tried, what is printed, and that a failure is told and counts."""

from __future__ import annotations

import pytest
import torch

from thinwire.cli import main as cli
from thinwire.cli import selftest
from thinwire.config.registry import CODECS, EXCHANGES
from thinwire.testing import codec_laws, copies, exchange_laws, training
from thinwire.testing.laws import CPU, BrokenLaw, demand, demand_refusal


@pytest.fixture
def quick(monkeypatch) -> list[tuple]:
    """Note the laws that would run, run none of them, and copy little."""
    tried: list[tuple] = []
    for laws in (codec_laws.LAWS, exchange_laws.LAWS):
        for law in laws:
            monkeypatch.setitem(laws, law, lambda *given, law=law: tried.append((law, *given)))
    monkeypatch.setattr(copies, "SIZES", (1000,))
    return tried


def test_everything_registered_is_tried_on_the_device(quick, capsys):
    threads = torch.get_num_threads()
    assert cli.main(["selftest", "--device", "cpu"]) == 0
    torch.set_num_threads(threads)
    kinds = {given[4] for given in quick if given[0] == "gradient"}
    assert {given[1] for given in quick} == {*CODECS.names(), *EXCHANGES.names()} and kinds == set(codec_laws.INPUTS)
    assert all(given[3] == CPU for given in quick)
    printed = capsys.readouterr().out
    assert "training: 12 tried, 0 failed, losses within 0.0e+00" in printed.replace(f"{len(CODECS.names())} tried", "12 tried")
    assert "copy to the device: 0.00 MB" in printed and "all passed" in printed


def test_a_failure_is_told_and_the_rest_goes_on(quick, monkeypatch, capsys):
    def broken(codec, device):
        if codec == "dense":
            raise BrokenLaw("losses nan")
        return 0.0

    monkeypatch.setattr(selftest, "trains_as_on_the_cpu", broken)
    assert cli.main(["selftest", "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert "1 failed, losses" in printed and "training with dense: BrokenLaw: losses nan" in printed and "1 of " in printed


def test_another_loss_is_found(monkeypatch):
    right = training.losses_on(CPU, "dense")
    found = iter([right, [loss * 1.01 for loss in right]])
    monkeypatch.setattr(training, "losses_on", lambda device, codec: next(found))
    with pytest.raises(BrokenLaw, match="on the CPU"):
        training.trains_as_on_the_cpu("dense", CPU)


def test_demands_are_made():
    demand(True, "")
    with pytest.raises(BrokenLaw, match="why"):
        demand(torch.tensor(False), "why")
    with pytest.raises(BrokenLaw, match="not refused"):
        demand_refusal(lambda: None, "x", "a mistake")
    with pytest.raises(BrokenLaw, match="refused without 'x'"):
        demand_refusal(lambda: int("n"), "x", "a mistake")
    demand_refusal(lambda: int("n"), "invalid literal", "a mistake")
