"""Codes of an ABORT: what is passed on from worker to worker, and bytes that are none."""

from __future__ import annotations

import pytest

from thinwire.link.errors import (
    KINDS,
    Abort,
    Interrupted,
    LinkError,
    ProtocolError,
    Replaced,
    Stopping,
    aborted,
    decode_abort,
    encode_abort,
)


def test_the_reason_is_what_began_it_after_any_number_of_workers():
    error: LinkError = Interrupted("replica 0 stage 3 was restarted", code=Abort.REFUSED)
    for worker in (2, 1, 0):
        error = aborted(f"replica 0 stage {worker} aborted the link", *decode_abort(encode_abort(error.code, error.reason)))
    assert isinstance(error, Interrupted) and error.code is Abort.REFUSED and error.reason == "replica 0 stage 3 was restarted"
    assert str(error) == "replica 0 stage 0 aborted the link: replica 0 stage 3 was restarted"


@pytest.mark.parametrize("error", [LinkError("x"), Interrupted("x", 3), Replaced("x"), Stopping("x"), ProtocolError("step", 1, 2)])
def test_an_error_is_the_same_at_the_other_end(error):
    heard = aborted("told", *decode_abort(encode_abort(error.code, error.reason)))
    assert heard.code is error.code and heard.reason == error.reason == str(error)
    assert type(heard) is (LinkError if isinstance(error, ProtocolError) else type(error))


def test_numbers_stay_what_they_were():
    assert {code.name: int(code) for code in Abort} == {
        "LOST": 0,
        "RECOVERING": 1,
        "REPLACED": 2,
        "STOPPING": 3,
        "REFUSED": 4,
        "STUCK": 5,
        "ENDED": 6,
        "PROTOCOL": 7,
    }
    assert set(KINDS) < set(Abort)


@pytest.mark.parametrize("number", range(256))
def test_any_byte_is_a_code_or_a_plain_loss(number):
    code, reason = decode_abort(bytes([number]) + b"stopping: \x1b[2J\xff" * 200)
    assert code == (number if number in set(Abort) else Abort.LOST) and reason.isprintable() and len(reason) <= 1000
