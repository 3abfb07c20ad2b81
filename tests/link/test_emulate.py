"""Laws of pace and emulation, with times that the test passes in."""

from __future__ import annotations

import itertools

import pytest

from thinwire.config.profiles import OPEN, PROFILES, find_profile
from thinwire.link.emulate import LOOKAHEAD_SECONDS, Wire, make_wire
from thinwire.link.pace import TokenBucket


def test_transmission_occupies_the_line_and_propagation_does_not():
    wire = Wire(1000.0, delay=0.5)
    assert [wire.admit(bytes(100), 10.0) for _ in range(3)] == pytest.approx([10.6, 10.7, 10.8])
    assert wire.admit(bytes(100), 20.0) == pytest.approx(20.6)


def test_pieces_arrive_in_order_and_not_before_their_time():
    wire = Wire(1000.0, delay=0.2, jitter=0.5, seed=3)
    pieces = [bytes([number]) * 50 for number in range(40)]
    times = [wire.admit(piece, 0.0) for piece in pieces]
    assert times == sorted(times)
    assert len({round(later - earlier, 6) for earlier, later in itertools.pairwise(times)}) > 3, "the jitter has no effect"
    assert all(0.05 * (number + 1) + 0.2 <= at + 1e-9 for number, at in enumerate(times))
    assert wire.due(times[9] - 1e-9) == pieces[: times.index(times[9])]
    assert wire.due(times[-1]) == pieces[times.index(times[9]) :]
    assert wire.next_at is None


def test_the_line_takes_work_shortly_before_it_is_free():
    wire = Wire(1000.0)
    wire.admit(bytes(100), 0.0)
    assert not wire.accepts(0.1 - 2 * LOOKAHEAD_SECONDS)
    assert wire.accepts_at() == pytest.approx(0.1 - LOOKAHEAD_SECONDS)
    assert wire.accepts(wire.accepts_at())


def test_a_long_transfer_has_the_declared_rate():
    wire = Wire(250_000.0, delay=0.02)
    now, last = 0.0, 0.0
    for _ in range(1000):
        while not wire.accepts(now):
            now = wire.accepts_at()
        last = wire.admit(bytes(16_406), now)
    assert 1000 * 16_406 / (last - 0.02) == pytest.approx(250_000.0, rel=1e-3)


def test_latency_as_occupancy_holds_the_line_once_per_frame():
    wire = Wire(1000.0, delay=0.5, latency_occupies=True)
    assert wire.admit(bytes(100), 0.0, frames=1) == pytest.approx(0.6)
    assert wire.admit(bytes(100), 0.0, frames=0) == pytest.approx(0.7)
    assert wire.admit(bytes(100), 0.0, frames=1) == pytest.approx(1.3)


def test_a_cut_loses_what_is_in_flight():
    wire = Wire(1000.0, delay=1.0)
    wire.admit(b"x", 0.0)
    wire.cut()
    assert wire.due(100.0) == [] and wire.in_flight == 0


def test_token_bucket_lets_a_burst_through_after_a_pause():
    bucket = TokenBucket(100.0, burst=50.0)
    assert bucket.take(50, 0.0) == 0.0
    assert bucket.take(50, 0.0) == pytest.approx(0.5)
    assert bucket.take(50, 10.0) == 10.0
    with pytest.raises(ValueError, match="above 0"):
        TokenBucket(0.0)


def test_the_slower_end_sets_the_rate():
    fast_down = find_profile("up5_down50mbps_20ms")
    assert (fast_down.up_mbps, fast_down.down_mbps, fast_down.delay_ms) == (5.0, 50.0, 20.0)
    assert make_wire(fast_down, OPEN, None).line.rate == pytest.approx(5e6 / 8)
    assert make_wire(OPEN, fast_down, None).line.rate == pytest.approx(50e6 / 8)
    assert make_wire(fast_down, fast_down, 2.0).line.rate == pytest.approx(2e6 / 8)
    assert make_wire(OPEN, OPEN, None).plain


def test_named_profiles():
    assert PROFILES["satellite"].delay_ms == 300 and PROFILES["satellite"].up_mbps == 20
    assert PROFILES["protocol_nanogpt"].latency_occupies
    assert find_profile("20mbps_30ms_jitter5ms").jitter_ms == 5.0
    assert find_profile("1.5mbps").up_mbps == 1.5
    assert make_wire(find_profile("dsl_2mbps"), find_profile("dsl_2mbps"), None).delay == pytest.approx(0.02)


@pytest.mark.parametrize("name, hint", [("dsl", "dsl_2mbps"), ("satelite", "satellite"), ("20mpbs", "known are"), ("0mbps", "above 0")])
def test_an_unknown_profile_is_refused_with_the_nearest(name, hint):
    with pytest.raises(ValueError, match=hint):
        find_profile(name)
