"""The contract names whatever differs from it."""

from __future__ import annotations

import pytest

from thinwire.link.contract import Contract, Cursor, Flow, Phase, TensorForm
from thinwire.link.errors import ProtocolError
from thinwire.link.frame import Channel, Frame, Header, Kind

FORMS = (TensorForm(2, (4, 8), 128), TensorForm(6, (9,), 40, exact=False))
FLOW = Flow.constant(FORMS, microbatches=2, first_step=10)
CONTRACT = Contract(outgoing=FLOW, incoming=FLOW, epoch=1, basis_version=5, exchange_bytes=100)


def data(step: int = 10, microbatch: int = 0, tensor: int = 0, **changes) -> Header:
    form = FORMS[tensor]
    fields = {"epoch": 1, "basis_version": 5, "dtype": form.dtype, "dims": form.dims, **changes}
    size = fields.pop("size", form.max_bytes)
    return Frame.make(Kind.DATA, bytes(size), step=step, microbatch=microbatch, tensor=tensor, **fields).header


def walk(cursor: Cursor, *headers: Header) -> None:
    for header in headers:
        cursor.check(header)
        cursor.advance(header)


def whole_step(step: int, **changes) -> list[Header]:
    return [data(step, microbatch, tensor, **changes) for microbatch in (0, 1) for tensor in (0, 1)]


def test_the_declared_order_passes():
    walk(Cursor(FLOW, CONTRACT), *whole_step(10), *whole_step(11), *whole_step(12, basis_version=6))


@pytest.mark.parametrize(
    "before, wrong, field",
    [
        (0, data(dtype=3), "dtype"),
        (0, data(dims=(8, 4)), "dims"),
        (0, data(size=127), "length"),
        (0, data(size=129), "length"),
        (1, data(tensor=1, size=41), "length"),
        (1, data(), "tensor"),
        (2, data(), "microbatch"),
        (0, data(tensor=1), "tensor"),
        (0, data(microbatch=1), "microbatch"),
        (0, data(step=11), "step"),
        (4, data(step=10), "step"),
        (4, data(step=12), "step"),
        (0, data(epoch=2), "epoch"),
        (0, data(basis_version=4), "basis_version"),
        (1, data(tensor=1, basis_version=6), "basis_version"),
        (0, Frame.make(Kind.STEP, bytes(5000), epoch=1).header, "length"),
        (0, Frame.make(Kind.DATA, bytes(101), channel=Channel.EXCHANGE, epoch=1).header, "length"),
    ],
)
def test_anything_else_is_named(before, wrong, field):
    cursor = Cursor(FLOW, CONTRACT)
    walk(cursor, *whole_step(10)[:before])
    with pytest.raises(ProtocolError) as caught:
        cursor.check(wrong)
    assert caught.value.field == field


def test_a_variable_tensor_may_be_short_and_exchange_stays_within_its_limit():
    cursor = Cursor(FLOW, CONTRACT)
    walk(cursor, data(), data(tensor=1, size=3), Frame.make(Kind.DATA, bytes(100), channel=Channel.EXCHANGE, epoch=1).header)


def test_repeated_and_reordered_frames_are_told_apart():
    cursor = Cursor(FLOW, CONTRACT)
    walk(cursor, *whole_step(10)[:2])
    with pytest.raises(ProtocolError, match="repeated"):
        cursor.check(data())
    with pytest.raises(ProtocolError, match="reordered"):
        cursor.check(data(step=11))


def test_a_direction_without_flow_carries_no_data():
    with pytest.raises(ProtocolError, match="no boundary payload"):
        Cursor(Flow(), Contract(epoch=1)).check(data())


def test_a_new_phase_begins_at_its_step():
    small = TensorForm(2, (4, 2), 32)
    flow = Flow((Phase(0, (FORMS[0],), 1), Phase(2, (small,), 1)))
    cursor = Cursor(flow, CONTRACT)
    walk(cursor, data(0), data(1), data(2, dims=(4, 2), size=32))
    with pytest.raises(ProtocolError, match="dims"):
        cursor.check(data(3))


def test_a_direction_may_rest_for_whole_steps_if_declared():
    cursor = Cursor(Flow.constant(FORMS, 2, 10, consecutive=False), CONTRACT)
    walk(cursor, *whole_step(10), *whole_step(14))
    with pytest.raises(ProtocolError, match="step"):
        cursor.check(data(13))
    walk(cursor, data(20))
    with pytest.raises(ProtocolError, match="step"):
        cursor.check(data(21))


def test_mirrored_swaps_the_directions():
    contract = Contract(outgoing=FLOW, epoch=2)
    assert contract.mirrored().incoming == FLOW
    assert contract.mirrored().mirrored() == contract
