"""All stages read the data: whoever reads other data than stage 0 refuses to start, and says so."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from thinwire.config.sections import DataConfig, RunConfig
from thinwire.run import agree
from thinwire.run.agree import Start, agree_on_data


def training(first: bool, everywhere: bool, told: list):
    """Return a stage that hears from stage 0 that the data is `ab`."""

    def announce(facts, form):
        told.append(facts)
        return {"data": "ab", "validation_rows": 2, "resume": False, "summarised": -1}

    return SimpleNamespace(
        config=replace(RunConfig(), data=DataConfig(everywhere=everywhere)),
        group=SimpleNamespace(announce=announce, replica=0),
        compute=SimpleNamespace(microbatch=1, stages=[SimpleNamespace(plan=SimpleNamespace(index=0 if first else 2))]),
        has_first=first,
        folder=None,
        data=None,
        report=lambda event: None,
    )


@pytest.fixture
def data(monkeypatch):
    """Let a stage read data with a fingerprint of its own."""
    found = SimpleNamespace(fingerprint="ab")
    monkeypatch.setattr(agree, "read_data", lambda training: found)
    monkeypatch.setattr(agree, "validation_batch", lambda data, rows, microbatch: torch.zeros(2, 3))
    monkeypatch.setattr(agree, "summarised", lambda folder: -1)
    return found


def test_every_stage_has_the_data_and_only_the_first_tells_of_it(data):
    for first in (True, False):
        told: list = []
        stage = training(first, True, told)
        agree_on_data(stage, Start())
        assert stage.data is data and (told[0] is not None) == first


def test_without_it_only_the_first_opens_the_data(data):
    stage = training(False, False, [])
    agree_on_data(stage, Start())
    assert stage.data is None


def test_other_data_is_refused(data):
    data.fingerprint = "cd"
    with pytest.raises(ValueError, match=r"stage 2 reads other data than stage 0 \(fingerprints cd and ab\).*leave data.everywhere out"):
        agree_on_data(training(False, True, []), Start())
