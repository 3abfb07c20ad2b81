"""HELLO: content, differences, and what a link does with them."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from link.support import LEFT, RIGHT, pair, stop, terms
from patience import HANG
from thinwire.link.contract import Contract
from thinwire.link.errors import Interrupted, LinkError, ProtocolError, Replaced, Stopping
from thinwire.link.frame import Channel, Frame, Kind
from thinwire.link.hello import PeerBehind, config_hash, decode_hello, differences, judge, make_hello
from thinwire.link.options import LinkOptions

CONSUMED = ((0, 0),) * len(Channel)


def hello(worker_id=RIGHT, **changes):
    return replace(make_hello(terms(worker_id), 4, LinkOptions(), 17, CONSUMED), **changes)


def test_hello_survives_the_wire():
    assert decode_hello(hello().encode()) == hello()


def test_equal_ends_have_no_differences():
    assert differences(hello(LEFT), hello(RIGHT), RIGHT) == []


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"config": {"model.width": 128, "codec.name": "dense"}}, "config model.width: 64 here, 128 there"),
        ({"config": {"model.width": 64.0, "codec.name": "dense"}}, "config model.width: 64 here, 64.0 there"),
        ({"config": {"model.width": 64}}, "config codec.name: 'dense' here, nothing there"),
        ({"run": "other"}, "run: 'test' here, 'other' there"),
        ({"protocol": 1}, "protocol version: 3 here, 1 there"),
        ({"stage": 3}, "place: expected replica 0 stage 1, the peer says replica 0 stage 3"),
        ({"config_hash": "0" * 64}, "config hash"),
        ({"credit": (1, 2)}, "link.credit_frames"),
    ],
)
def test_a_difference_is_named(changes, words):
    assert words in " ".join(differences(hello(LEFT), hello(**changes), RIGHT))


def test_whoever_still_trains_follows_one_that_ends_and_that_one_waits():
    with pytest.raises(Stopping, match="replica 0 stage 1 was asked to end"):
        judge(hello(LEFT), hello(ending=True, epoch=9), RIGHT, None)
    with pytest.raises(PeerBehind):
        judge(hello(LEFT, ending=True), hello(epoch=9), RIGHT, None)
    judge(hello(LEFT, ending=True), hello(ending=True, received=0), RIGHT, None, heard=False)


def test_the_hash_ignores_the_order_of_fields():
    assert config_hash({"a": 1, "b": 2}) == config_hash({"b": 2, "a": 1}) != config_hash({"a": 1, "b": 3})


def test_a_damaged_hello_is_a_protocol_error():
    generator = random.Random(1)
    good = hello().encode()
    samples: list[bytes] = [b"", b"[]", b"[" * 100_000, b"{}", json.dumps({**json.loads(good), "received": -1}).encode()]
    for _ in range(500):
        data = bytearray(good)
        data[generator.randrange(len(data))] = generator.randrange(256)
        samples.append(bytes(data))
    refused = 0
    for sample in samples:
        try:
            decode_hello(sample)
        except ProtocolError:
            refused += 1
    assert refused > 100
    for sample in samples[:5]:
        with pytest.raises(ProtocolError):
            decode_hello(sample)


def test_config_skew_is_refused_on_both_ends_with_the_field(world):
    skewed = terms(RIGHT, config={"model.width": 128, "codec.name": "dense"})
    with pair(world, right_terms=skewed) as (left, right, _):
        for link in (left, right):
            with pytest.raises(LinkError, match=r"model\.width"):
                link.wait_open(HANG)
            with pytest.raises(LinkError, match=r"model\.width"):
                link.receive(Channel.BOUNDARY, HANG)


def test_the_right_certificate_for_another_stage_is_refused(world):
    with pair(world, right_terms=terms(LEFT)) as (left, right, _):
        for link in (left, right):
            with pytest.raises(LinkError, match="place: expected replica 0 stage 1"):
                link.receive(Channel.CONTROL, HANG)


def test_the_end_in_the_lower_epoch_is_told_and_the_higher_waits(world):
    with pair(world, Contract(epoch=2), right_contract=Contract(epoch=3)) as (left, right, _):
        with pytest.raises(Interrupted) as caught:
            left.wait_open(HANG)
        assert caught.value.epoch == 3
        with pytest.raises(TimeoutError):
            right.wait_open(0.2)
        assert right.error is None


def test_a_restarted_peer_is_noticed(world):
    with pair(world) as (left, right, _):
        left.wait_open(HANG)
        right.wait_open(HANG)
        right._session.terms = terms(RIGHT, incarnation=8)
        right.reset_connection()
        for link in (left, right):
            with pytest.raises(Interrupted, match="restarted"):
                link.receive(Channel.CONTROL, HANG)
            with pytest.raises(LinkError, match="restarted"):
                link.send(Frame.make(Kind.STEP), HANG)


def test_an_older_process_is_turned_away_and_the_newer_one_goes_on(world):
    """The peer that was replaced comes back: it is told to end, and the link waits for the newer one without a failure."""
    with pair(world) as (left, right, _):
        left.wait_open(HANG)
        right.wait_open(HANG)
        left._session.reception.newest = 9  # a process that started later has been met
        right.reset_connection()
        with pytest.raises(Replaced, match="a newer process has taken the place"):
            right.receive(Channel.CONTROL, HANG)
        assert left.error is None
        stop(left)  # it waits for the newer one
