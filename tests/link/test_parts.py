"""Parts of frames: small ones on a slow line, large ones on a fast one, and what comes out is what went in."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from thinwire.link.contract import Contract, Cursor, Flow, TensorForm
from thinwire.link.errors import ProtocolError
from thinwire.link.frame import HEADER_BYTES, MOST_PART_BYTES, PART_BYTES, Channel, Dtype, Frame, Kind, Parser
from thinwire.link.inbox import Inbox
from thinwire.link.meter import LinkMeter
from thinwire.link.options import LinkOptions
from thinwire.link.outbox import Outbox
from thinwire.link.session import LARGE_BATCH, QUICK_SECONDS, SMALL_BATCH, Session

SIZE = 600_000
FLOW = Flow.constant((TensorForm(Dtype.RAW, (SIZE,), SIZE),), microbatches=1)
CONTRACT = Contract(FLOW, FLOW)


def ends() -> tuple[Outbox, Inbox, Parser]:
    options = LinkOptions()
    inbox = Inbox(Cursor(FLOW, CONTRACT), options, LinkMeter())
    return Outbox(Cursor(FLOW, CONTRACT), options, LinkMeter()), inbox, Parser(inbox.check)


def carry(limits: list[int], cut: int) -> tuple[list[int], bytes, bytes]:
    """Send one frame in batches of such limits, read in pieces of such a length; return the lengths of its parts, and both payloads."""
    outbox, inbox, parser = ends()
    payload = os.urandom(SIZE)
    outbox.put(Frame.make(Kind.DATA, payload, dims=(SIZE,)), None)
    lengths, left = [], iter(limits)
    while outbox.waiting:
        batch = outbox.take(next(left))
        data = b"".join(batch.pieces)
        for start in range(0, len(data), cut):
            for part in parser.feed(data[start : start + cut]):
                lengths.append(part.header.length)
                inbox.accept(part, 0.0)
    return lengths, payload, bytes(inbox.take(Channel.BOUNDARY, 0).payload)


@pytest.mark.parametrize("cut", [2**14, 100, 10**6])
@pytest.mark.parametrize(
    "limit, most", [(SMALL_BATCH, PART_BYTES), (2 * SMALL_BATCH, 2 * PART_BYTES + HEADER_BYTES), (LARGE_BATCH, MOST_PART_BYTES)]
)
def test_a_frame_arrives_whole_in_parts_of_the_size_of_a_batch(limit, most, cut):
    lengths, sent, arrived = carry([limit] * 100, cut)
    assert arrived == sent and set(lengths[:-1]) == {most} and len(lengths) == -(-SIZE // most)


def test_the_size_may_change_within_a_frame():
    lengths, sent, arrived = carry([LARGE_BATCH, SMALL_BATCH, LARGE_BATCH, *[SMALL_BATCH] * 50], 2**14)
    assert arrived == sent and lengths[:3] == [MOST_PART_BYTES, PART_BYTES, MOST_PART_BYTES]


def test_parts_go_again_as_they_were():
    outbox, *_ = ends()
    outbox.put(Frame.make(Kind.DATA, bytes(SIZE), dims=(SIZE,)), None)
    first = b"".join(outbox.take(LARGE_BATCH).pieces)
    outbox.rewind(0, ((0, 0),) * len(Channel))
    assert b"".join(outbox.take(SMALL_BATCH).pieces) == first


@pytest.mark.parametrize("length", [1, PART_BYTES - 1, MOST_PART_BYTES + 1])
def test_parts_of_other_lengths_are_refused(length):
    _, inbox, _ = ends()
    header = Frame.make(Kind.DATA, bytes(length), dims=(SIZE,), sequence=1).header
    with pytest.raises(ProtocolError, match="length"):
        inbox.check(type(header)(**{name: getattr(header, name) for name in header.__slots__} | {"total": SIZE}))


def test_small_frames_share_a_batch_only_on_a_fast_network():
    outbox, *_ = ends()
    for _ in range(3):
        outbox.put(Frame.make(Kind.STEP, b"x"), None)
    assert outbox.take(SMALL_BATCH).frames == 1 and outbox.take(LARGE_BATCH).frames == 2


def test_a_network_gets_more_at_once_as_long_as_it_is_quick():
    state = SimpleNamespace(_batch=SMALL_BATCH, _blocked_at=None)
    for _ in range(10):
        Session._note_speed(state, True, 1.0)
    assert state._batch == LARGE_BATCH
    Session._note_speed(state, False, 1.0)
    Session._note_speed(state, False, 1.0 + QUICK_SECONDS / 2)
    Session._note_speed(state, True, 1.0 + QUICK_SECONDS / 2)
    assert state._batch == LARGE_BATCH and state._blocked_at is None
    Session._note_speed(state, False, 2.0)
    Session._note_speed(state, True, 2.0 + 2 * QUICK_SECONDS)
    assert state._batch == SMALL_BATCH
