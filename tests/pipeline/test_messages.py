"""What a member of the roster says between payloads: anything but what was agreed is refused by name, at both ends, and is safe to show."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, fields

import pytest

from link.support import World, pair
from patience import HANG, wait_until
from thinwire.link.contract import Contract
from thinwire.link.errors import LinkError, ProtocolError
from thinwire.link.frame import EPOCHS, Frame, Kind
from thinwire.link.link import Link
from thinwire.link.message import ANY, FLAG, Form
from thinwire.pipeline import forms
from thinwire.pipeline.control import FIELDS, Control
from thinwire.pipeline.outcome import Outcome
from thinwire.pipeline.schedule import depths


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("identities"))


@pytest.fixture
def links(world) -> Iterator[tuple[Link, Link]]:
    """Return this worker's link to the right, and the other end of it, where somebody lies."""
    with pair(world) as (left, right, _):
        yield left, right


def refused(control: Control, links: tuple[Link, Link], data: bytes, ask) -> str:
    """Send a message from the right; return how it was refused here, once the other end knows it too."""
    _, theirs = links
    theirs.send(Frame.make(Kind.STEP, data), HANG)
    with pytest.raises(ProtocolError, match="from replica 0 stage 1") as caught:
        ask(control)
    wait_until(lambda: theirs.error is not None)
    reason = str(caught.value).removesuffix(" (from replica 0 stage 1)")
    assert isinstance(theirs.error, LinkError) and reason in str(theirs.error), (theirs.error, reason)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000
    return str(caught.value)


OWN = Outcome(3, 1.0, 2.0)
BAD_OUTCOMES = {
    "infinite delay": {"delay_seconds": math.inf},
    "delay that is no number": {"delay_seconds": math.nan},
    "negative turn": {"turn_seconds": -1.0},
    "long number": {"squared_norm": 10**400},
    "text": {"loss": "\x1b[2J"},
    "flag": {"stop": 1},
    "half a character": {"loss": "\ud800"},
    "steps": {"saved": [10**30]},
    "true as a number": {"step": True},
    "no replicas": {"replicas": 0},
}


def test_the_form_of_an_outcome_has_all_its_fields():
    assert FIELDS.keys() == {field.name for field in fields(Outcome)}


@pytest.mark.parametrize("case", BAD_OUTCOMES)
def test_an_outcome_that_cannot_be_is_refused(links, case):
    name = next(iter(BAD_OUTCOMES[case]))
    message = json.dumps({**asdict(OWN), **BAD_OUTCOMES[case]}).encode()
    assert name in refused(Control(None, links[0]), links, message, lambda control: control.settle(OWN))


def test_a_loss_that_is_no_number_is_for_training_to_judge(links):
    links[1].send(Frame.make(Kind.STEP, json.dumps({**asdict(OWN), "loss": math.nan, "squared_norm": math.inf}).encode()), HANG)
    outcome = Control(None, links[0]).settle(OWN)
    assert outcome.loss is not None and math.isnan(outcome.loss) and math.isinf(outcome.squared_norm)


BAD_JSON = {
    "nested": b"[" * 4000,
    "nested object": b'{"workers":' * 30 + b"1" + b"}" * 30,
    "not UTF-8": b"\xff\xfe{}",
    "UTF-16": '{"workers": []}'.encode("utf-16"),
    "empty": b"",
    "a list": b"[]",
    "a long number": b'{"workers": ' + b"9" * 3900 + b"}",
}


@pytest.mark.parametrize("case", BAD_JSON)
def test_a_message_that_is_none_is_refused(links, case):
    refused(Control(None, links[0]), links, BAD_JSON[case], lambda control: control.gather(True, FLAG))


VOTE = {"steps": ["step-000004"], "copies": {"0": []}, "recovering": False, "confirmed": -1}
BAD_VOTES = {
    "no vote": [1],
    "missing field": {name: VOTE[name] for name in ("steps", "copies", "confirmed")},
    "another field": VOTE | {"more": 1},
    "a step that is none": VOTE | {"steps": ["step-1"]},
    "a way out": VOTE | {"steps": ["../../x"]},
    "other digits": VOTE | {"steps": ["step-\u0660\u0660\u0660\u0660\u0660\u0660"]},
    "half a character": VOTE | {"steps": ["step-000004\ud800"]},
    "a long step": VOTE | {"steps": ["step-" + "9" * 2000]},
    "copies as a list": VOTE | {"copies": ["step-000004"]},
    "a copy that is no list": VOTE | {"copies": {"0": "step-000004"}},
    "copies of everyone": VOTE | {"copies": {str(stage): [] for stage in range(9)}},
    "a flag that is none": VOTE | {"recovering": "yes"},
    "a step confirmed that is none": VOTE | {"confirmed": math.inf},
    "control characters": VOTE | {"steps": ["\x1b]0;owned\x07\n" * 50]},
}


@pytest.mark.parametrize("case", BAD_VOTES)
def test_a_vote_that_is_none_is_refused(links, case):
    message = json.dumps({"workers": [[0, BAD_VOTES[case]]]}).encode()
    ask = lambda control: control.gather(VOTE, forms.VOTE)  # noqa: E731
    assert "message.workers[0][1]" in refused(Control(None, links[0]), links, message, ask)


@pytest.mark.parametrize("workers", [[[0, True], [2, True]], [[0, True], [1, True]], [[True, True]], [[0]], [[-1, True]]])
def test_workers_that_are_not_there_do_not_vote(links, workers):
    links[1].send(Frame.make(Kind.STEP, json.dumps({"workers": workers}).encode()), HANG)
    with pytest.raises(ProtocolError, match="workers"):
        Control(None, links[0]).gather(True, ANY if len(workers[0]) == 2 else FLAG)


FACTS: dict[str, tuple[Form, dict]] = {
    "data": (forms.ABOUT_DATA, {"data": "x", "validation_rows": 0, "resume": False}),
    "rows": (forms.ABOUT_ROWS, {"rows": 10**12, "bytes_per_token": 1.0}),
    "order": (forms.ORDER, {"length": 1, "limit": 1, "end": None, "sampling": {"temperature": math.nan}}),
    "last": (forms.LAST, {"step": 2, "outcome": 3}),
    "nothing": (forms.FINGERPRINT, {}),
}


@pytest.mark.parametrize("case", FACTS)
def test_facts_that_cannot_be_are_refused(links, case):
    form, facts = FACTS[case]
    links[1].send(Frame.make(Kind.STEP, json.dumps(facts).encode()), HANG)
    with pytest.raises(ProtocolError, match="facts"):
        Control(links[0], None).announce(None, form)


def test_texts_in_a_message_are_safe_to_show(links):
    links[1].send(Frame.make(Kind.STEP, json.dumps({"workers": [[0, {"value": "full\x1b[2J\n" + "x" * 3000}]]}).encode()), HANG)
    _, problem = Control(None, links[0]).gather({"value": None})
    assert problem["value"].startswith("full\\x1b[2J\\nx") and problem["value"].isprintable()


@pytest.mark.parametrize("compute", [0.0, 1e-300, 1.0])
def test_a_depth_is_found_for_any_times_that_are_agreed_on(compute):
    assert depths(3, 8, 1e6, compute) == [8, 8, 1]


def test_an_epoch_that_no_header_holds_is_refused():
    with pytest.raises(ValueError, match="epoch"):
        Contract(epoch=EPOCHS)
