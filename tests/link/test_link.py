"""Laws of a link: order, resume, credit, priority, goodbye."""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
import types
from dataclasses import replace

import pytest

from link.support import LEFT, LOOPBACK, QUICK, RIGHT, STEADY, hurry, pair, stop, terms
from patience import HANG, wait_until
from thinwire.config.profiles import LinkProfile
from thinwire.link.contract import Contract, Flow, TensorForm
from thinwire.link.endpoint import Endpoint
from thinwire.link.errors import LinkClosed, LinkError, ProtocolError
from thinwire.link.frame import HEADER_BYTES, PART_BYTES, Channel, Dtype, Frame, Kind
from thinwire.link.link import Link
from thinwire.link.listener import Listener
from thinwire.link.options import LinkOptions
from thinwire.link.peer import Worker, WorkerId
from thinwire.link.probe import RECORD_OVERHEAD, probe

LARGEST = 200_000
FORM = TensorForm(Dtype.RAW, (), LARGEST, exact=False)
FLOW = Flow.constant((FORM,), microbatches=4)
CONTRACT = Contract(FLOW, FLOW)


def data_frame(number: int, payload: bytes, **fields) -> Frame:
    return Frame.make(Kind.DATA, payload, step=number // 4, microbatch=number % 4, **fields)


def random_payloads(count: int, seed: int) -> list[bytes]:
    generator = random.Random(seed)
    sizes = (0, 1, 500, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 50_000, LARGEST)
    return [generator.randbytes(generator.choice(sizes)) for _ in range(count)]


def run_all(*jobs) -> None:
    """Run jobs in threads and raise what any of them raised."""
    errors: list[BaseException] = []

    def guarded(job) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_fifty_resets_lose_nothing_and_repeat_nothing(world):
    """Both ends break the connection behind every tenth frame that they send, while the I/O threads are at work on it."""
    count, every = 250, 10
    streams = {"left": random_payloads(count, 1), "right": random_payloads(count, 2)}
    digests = {}
    breaking = threading.Lock()
    options = replace(STEADY, credit_frames=16, backoff_seconds=0.002)

    def break_connection(link, left, right):
        with breaking:
            wait_until(lambda: left.state == right.state == "open")
            before = left.meter.connections
            link.reset_connection()
            wait_until(lambda: left.meter.connections > before)

    def sender(link, name, *both):
        for number, payload in enumerate(streams[name]):
            link.send(data_frame(number, payload), HANG)
            if number % every == 0:
                break_connection(link, *both)

    def receiver(link, name):
        digest = hashlib.sha256()
        for number in range(count):
            frame = link.receive(Channel.BOUNDARY, HANG)
            assert (frame.header.step, frame.header.microbatch) == divmod(number, 4)
            digest.update(len(frame.payload).to_bytes(8, "big") + frame.payload)
        digests[name] = digest.hexdigest()

    with pair(world, CONTRACT, options=options) as (left, right, _):
        run_all(
            lambda: sender(left, "left", left, right),
            lambda: sender(right, "right", left, right),
            lambda: receiver(left, "right"),
            lambda: receiver(right, "left"),
        )
        assert left.meter.snapshot()["reconnects"] == 50
        assert left.meter.retransmitted + right.meter.retransmitted > 0
    for name, payloads in streams.items():
        expected = hashlib.sha256(b"".join(len(payload).to_bytes(8, "big") + payload for payload in payloads))
        assert digests[name] == expected.hexdigest()


EXACT = Contract(Flow.constant((TensorForm(2, (4, 8), 128),), microbatches=2, first_step=3))
WRONG = {
    "dtype": ({"dtype": 3}, 128),
    "dims": ({"dims": (8, 4)}, 128),
    "short": ({}, 127),
    "long": ({}, 129),
    "duplicate": ({"microbatch": 0}, 128),
    "reordered": ({"step": 4, "microbatch": 0}, 128),
    "basis": ({"basis_version": 1}, 128),
    "epoch": ({"epoch": 5}, 128),
}
FIELDS = {"short": "length", "long": "length", "duplicate": "microbatch", "reordered": "step", "basis": "basis_version"}


def exact_frame(size: int = 128, **changes) -> Frame:
    return Frame.make(Kind.DATA, bytes(size), **{"step": 3, "dtype": 2, "dims": (4, 8), **changes})


@pytest.mark.parametrize("refuser", ["sender", "receiver"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_frame_is_named_on_both_ends(world, name, refuser):
    changes, size = WRONG[name]
    field = FIELDS.get(name, name)
    with pair(world, EXACT) as (left, right, _):
        if refuser == "receiver":  # the sender does not look
            left._outbox._cursor.check = left._outbox._cursor.advance = lambda header: None
        left.send(exact_frame(), HANG)
        assert right.receive(Channel.BOUNDARY, HANG).payload == bytes(128)
        wrong = exact_frame(size, **{"microbatch": 1, **changes})
        if refuser == "sender":
            with pytest.raises(ProtocolError) as caught:
                left.send(wrong, HANG)
            assert caught.value.field == field
        else:
            left.send(wrong, HANG)
        for link in (left, right):
            with pytest.raises(LinkError, match=f"refused: {field} is"):
                link.receive(Channel.CONTROL, HANG)
            with pytest.raises(LinkError, match=f"refused: {field} is"):
                link.send(Frame.make(Kind.STEP), HANG)
            link._loop.thread.join(HANG)
            assert not link._loop.thread.is_alive() and link.state == "failed"


def test_a_basis_that_the_receiver_does_not_use_is_refused_on_both_ends(world):
    with pair(world, EXACT) as (left, right, _):
        left.send(exact_frame(basis_version=2), HANG)
        with pytest.raises(ProtocolError, match="basis_version is 2, expected 1"):
            right.receive(Channel.BOUNDARY, HANG, basis_version=1)
        with pytest.raises(LinkError, match="basis_version is 2, expected 1"):
            left.receive(Channel.CONTROL, HANG)


def test_a_repeated_sequence_number_is_refused_on_both_ends(world):
    with pair(world, CONTRACT) as (left, right, _):
        left.send(data_frame(0, b"a"), HANG)
        right.receive(Channel.BOUNDARY, HANG)
        left._outbox._sequence -= 1
        left.send(data_frame(1, b"b"), HANG)
        for link in (left, right):
            with pytest.raises(LinkError, match=r"sequence is 1, expected 2 \(repeated\)"):
                link.receive(Channel.BOUNDARY, HANG)


def test_a_stalled_consumer_holds_no_more_than_the_credit(world):
    options = replace(QUICK, credit_frames=8, credit_bytes=300_000)
    with pair(world, CONTRACT, options=options) as (left, right, _):
        sent = 6
        for number in range(sent):
            left.send(data_frame(number, bytes(50_000)), HANG)
        with pytest.raises(TimeoutError, match="no credit on BOUNDARY"):
            left.send(data_frame(sent, bytes(50_000)), 0.1)
        wait_until(lambda: right.held(Channel.BOUNDARY) == (6, 300_000))
        assert left.outstanding(Channel.BOUNDARY) == (6, 300_000)
        left.send(Frame.make(Kind.STEP, b"still flows"), HANG)
        assert right.receive(Channel.CONTROL, HANG).payload == b"still flows"
        right.receive(Channel.BOUNDARY, HANG)
        right.receive(Channel.BOUNDARY, HANG)
        left.send(data_frame(sent, bytes(50_000)), HANG)
        assert left.meter.blocked_seconds > 0


def test_a_frame_above_the_credit_travels_alone(world):
    options = replace(QUICK, credit_frames=8, credit_bytes=1000)
    with pair(world, CONTRACT, options=options) as (left, right, _):
        run_all(
            lambda: [left.send(data_frame(number, bytes(LARGEST)), HANG) for number in range(3)],
            lambda: [right.receive(Channel.BOUNDARY, HANG) for _ in range(3)],
        )


def test_a_peer_that_ignores_the_credit_is_refused(world):
    options = replace(QUICK, credit_frames=2)
    with pair(world, CONTRACT, options=options) as (left, right, _):
        left._outbox._credit_frames = 10
        for number in range(3):
            left.send(data_frame(number, b"x"), HANG)
        for link in (left, right):
            with pytest.raises(LinkError, match="refused: credit is"):
                link.receive(Channel.CONTROL, HANG)


def test_urgent_frames_overtake_bulk_on_a_thin_link(world):
    """Two snapshots are queued and the first is under way; what is sent behind them comes out before them."""
    order: list[Kind] = []
    with pair(world, CONTRACT, options=STEADY, profile=LinkProfile("thin", 10, 10, 1)) as (left, right, _):
        for link in (left, right):
            link.wait_open(HANG)
        take, begun, go_on = left._outbox.take, threading.Event(), threading.Event()
        accept = right._inbox.accept

        def held(limit):
            if begun.is_set():
                assert go_on.wait(HANG)
            batch = take(limit)
            if left.meter.sent.frames[Channel.BULK]:
                begun.set()
            return batch

        def noted(part, now):
            whole = accept(part, now)
            if whole:
                order.append(part.header.kind)
            return whole

        left._outbox.take, right._inbox.accept = held, noted
        for _ in range(2):
            left.send(Frame.make(Kind.SNAPSHOT, bytes(100_000)), HANG)
        assert begun.wait(HANG)
        left.send(data_frame(0, bytes(10_000)), HANG)
        left.send(Frame.make(Kind.STEP), HANG)
        go_on.set()
        for _ in range(2):
            right.receive(Channel.BULK, HANG)
        assert order == [Kind.STEP, Kind.DATA, Kind.SNAPSHOT, Kind.SNAPSHOT]
        assert left.meter.paced_seconds > 0


def test_what_is_sent_on_a_very_thin_link_arrives_though_the_other_end_is_quiet(world):
    """A PING waits behind 16 KB, 1.6 s at 0.08 Mbit/s: taken for silence, each new connection would begin again, for ever."""
    with pair(world, CONTRACT, profile=LinkProfile("very thin", 0.08, 0.08, 1)) as (left, right, _):
        for sender, receiver in ((right, left), (left, right)):
            sender.send(data_frame(0, bytes(18_000)), HANG)
            assert len(receiver.receive(Channel.BOUNDARY, HANG).payload) == 18_000


def test_a_question_that_waits_behind_bytes_that_still_move_raises_no_doubt(world):
    """Times and bytes are the test's: 1000 s after a PING the line still carries what was sent before it."""
    with pair(world, CONTRACT, options=STEADY) as (left, right, _):
        for link in (left, right):
            link.wait_open(HANG)
            stop(link)
        session, now = right._session, time.monotonic()
        arrived, more = session._arrived, True
        session.connection = types.SimpleNamespace(underway=lambda: (arrived, more))
        session.heartbeat.begin(now)
        session.heartbeat.rtt = None
        session.heartbeat.ping(now)
        for late in (1000.0, 2000.0):
            arrived += 1
            assert not session._doubtful(now + late)  # something more has arrived, and more is on its way
        assert not session._doubtful(now + 2000.0 + HANG - 1.0)
        assert session._doubtful(now + 2000.0 + HANG)  # nothing has
        arrived, more = arrived + 1, False
        assert session._doubtful(now + 3000.0)  # all has, but no answer came


def test_close_delivers_everything_and_the_other_end_drains_it(world):
    with pair(world, CONTRACT) as (left, right, _):
        for number in range(20):
            left.send(data_frame(number, bytes(30_000)), HANG)
        assert left.close()
        for _ in range(20):
            right.receive(Channel.BOUNDARY, HANG)
        with pytest.raises(LinkClosed, match="replica 0 stage 0 has closed"):
            right.receive(Channel.BOUNDARY, HANG)
        with pytest.raises(LinkClosed):
            right.send(Frame.make(Kind.STEP), HANG)
        with pytest.raises(LinkClosed):
            left.send(Frame.make(Kind.STEP), HANG)
        wait_until(lambda: right.state == "closed")


def test_abort_reaches_both_ends_while_data_flows(world):
    with pair(world, CONTRACT) as (left, right, _):
        for number in range(30):
            left.send(data_frame(number, bytes(LARGEST)), HANG)
        right.abort("no more memory")
        with pytest.raises(LinkError, match=r"replica 0 stage 1 aborted the link: no more memory"):
            left.receive(Channel.CONTROL, HANG)
        with pytest.raises(LinkError, match="aborted on this end: no more memory"):
            right.receive(Channel.CONTROL, HANG)


def test_meters_count_exactly_what_passes_on_the_socket(world):
    frames, size = 50, 80_000
    with pair(world, CONTRACT, options=STEADY, proxy=True) as (left, right, proxy):
        for number in range(frames):
            left.send(data_frame(number, os.urandom(size)), HANG)
        for _ in range(frames):
            right.receive(Channel.BOUNDARY, HANG)
        assert left.close()
        right.close()
        sent, received = left.meter.snapshot()["sent"], right.meter.snapshot()["received"]
        assert sent["payload"] == received["payload"] == frames * size
        assert sent["frames"] == received["frames"] == frames
        most_parts = -(-size // PART_BYTES)  # fewer on a network that takes more at once
        parts, rest = divmod(sent["framed_boundary"] - frames * size, HEADER_BYTES)
        assert rest == 0 and frames <= parts <= frames * most_parts and received["framed_boundary"] == sent["framed_boundary"]
        wait_until(lambda: proxy.down == sent["socket"])
        assert received["socket"] == proxy.down
        wait_until(lambda: proxy.up == right.meter.sent.socket)
        assert 0 < left.meter.received.socket <= proxy.up, "a PING may come after left has gone"
        records = sent["framed_boundary"] // 2**14
        assert sent["framed_boundary"] + records * RECORD_OVERHEAD <= sent["socket"] < 1.02 * frames * size


def test_a_silent_cut_is_reported(world):
    with pair(world, CONTRACT, proxy=True) as (left, right, proxy):
        for link in (left, right):
            link.wait_open(HANG)
        proxy.frozen.set()
        limits = {"ping_seconds": 0.1, "pong_grace_seconds": 0.1, "silent_seconds": 0.5, "establish_seconds": 0.3}
        hurry(left, right, reconnect_seconds=0.7, **limits)
        for link in (left, right):
            with pytest.raises(LinkError, match=r"no connection to replica 0 stage \d for 0.7 s"):
                link.receive(Channel.BOUNDARY, HANG)


DOUBTFUL = replace(QUICK, ping_seconds=0.1, pong_grace_seconds=0.2, silent_seconds=HANG)


def test_an_overdue_answer_opens_a_second_connection_that_wins(world):
    with pair(world, CONTRACT, options=DOUBTFUL, proxy=True) as (left, right, proxy):
        for link in (left, right):
            link.wait_open(HANG)
            link._session.broken_since -= 10 * HANG  # as if open for longer than the reconnect window
        proxy.lost = proxy.connections
        left.send(data_frame(0, b"lost on the first connection"), HANG)
        assert right.receive(Channel.BOUNDARY, HANG).payload == b"lost on the first connection"
        assert proxy.connections > proxy.lost
        wait_until(lambda: right.state == "open")


def test_a_path_that_takes_no_more_is_doubted_though_much_is_on_its_way(world):
    with pair(world, CONTRACT, options=DOUBTFUL, proxy=True) as (left, right, proxy):
        right.wait_open(HANG)
        proxy.flowing.clear()
        for number in range(60):
            right.send(data_frame(number, bytes(200_000)), HANG)
        wait_until(lambda: proxy.connections >= 2)
        proxy.flowing.set()
        for _ in range(60):
            assert len(left.receive(Channel.BOUNDARY, HANG).payload) == 200_000


def test_no_peer_fails_with_the_reason(world):
    options = LinkOptions(reconnect_seconds=0.3, close_seconds=0.5, establish_seconds=0.2)
    with pair(world, CONTRACT, options=options, frozen=True) as (left, right, _):
        for link in (left, right):
            with pytest.raises(LinkError, match="last problem"):
                link.wait_open(HANG)


def test_echoes_pass_an_emulated_line(world):
    """What no machine can be too slow for: a line is never faster than it is said to be."""
    with pair(world, options=STEADY, profile=LinkProfile("thin", 20, 20, 10)) as (left, right, _):
        left.wait_open(HANG)
        rtt, _ = probe(left, burst_bytes=100_000, timeout=HANG)
        assert rtt >= 0.02
        started, *answered = left.echo(PART_BYTES, 20, HANG)
        assert answered == sorted(answered) and answered[-1] - started >= 20 * PART_BYTES / (20e6 / 8) + 0.02
        wait_until(lambda: right.rtt is not None)
        assert right.rtt >= 0.02


def test_probe_counts_from_the_first_to_the_last_answer():
    """With times that the test passes in: a part per ms, and the least of three round trips."""
    part = PART_BYTES + HEADER_BYTES + RECORD_OVERHEAD
    trips = iter([[10.0, 10.3], [11.0, 11.1], [12.0, 12.2], [20.0, *(20.5 + 0.001 * number for number in range(64))]])
    rtt, rate = probe(types.SimpleNamespace(echo=lambda size, count, timeout: next(trips)))
    assert rtt == pytest.approx(0.1) and rate == pytest.approx(1000 * part)


def test_many_links_leave_no_thread_and_no_file_descriptor(world):
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    if not os.path.exists("/proc/self/fd"):
        pytest.skip("needs /proc")
    with pair(world):
        pass
    before = descriptors()
    for number in range(10):
        with pair(world, CONTRACT) as (left, right, _):
            right.wait_open(HANG)
            left.wait_open(HANG)
            if number % 3 == 1:
                right.reset_connection()
            if number % 3 == 2:
                left.abort("test")
    assert descriptors() == before


def test_two_links_share_one_listener_and_find_their_own_peer(world):
    worker_ids = {"right": RIGHT, "copy": WorkerId(1, 0)}
    workers = {name: Worker(worker_id, world.identity(name).certificate) for name, worker_id in worker_ids.items()}
    listener = Listener(LOOPBACK, Endpoint(world.identity("left")), workers.values(), QUICK)
    host, port = listener.address
    server = Worker(LEFT, world.identity("left").certificate, f"{host}:{port}")
    here = {name: Link.listen(listener, worker, terms(LEFT), Contract(), options=QUICK) for name, worker in workers.items()}
    there = {
        name: Link.connect(server, Endpoint(world.identity(name)), terms(worker_id), Contract(), options=QUICK)
        for name, worker_id in worker_ids.items()
    }
    for name, link in there.items():
        link.send(Frame.make(Kind.STEP, name.encode()), HANG)
    for name, link in here.items():
        assert link.receive(Channel.CONTROL, HANG).payload == name.encode()
    with pytest.raises(ValueError, match="already expected"):
        Link.listen(listener, workers["right"], terms(LEFT), Contract(), options=QUICK)
    run_all(*[link.close for link in (*here.values(), *there.values())])
    listener.close()


def test_a_goodbye_does_not_overtake_an_abort(world):
    """Whoever aborts and then closes wants the reason to arrive, also if the I/O thread is just about to send."""
    with pair(world) as (left, right, _):
        for link in (left, right):
            link.wait_open(HANG)
        pump, sending, go_on = right._session.pump, threading.Event(), threading.Event()

        def held(now: float) -> None:
            sending.set()
            go_on.wait(HANG)
            pump(now)

        right._session.pump = held
        right._loop.wake()
        assert sending.wait(HANG)
        right.abort("a reason")
        closer = threading.Thread(target=right.close)
        closer.start()
        wait_until(lambda: right._outbox._closing or len(right._loop._commands) > 1)
        go_on.set()
        with pytest.raises(LinkError, match="a reason"):
            left.receive(Channel.CONTROL, HANG)
        closer.join()
