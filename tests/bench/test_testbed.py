"""The testbed: asked against got on a short path, isolation, and a teardown that leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path as File

import pytest

from patience import HANG, wait_until
from testbed import Path, Testbed, namespaces, obstacle
from testbed.check import ask, start_listener
from testbed.forward import Direction

BENCH = File(__file__).parents[2] / "bench"
needs_root = pytest.mark.skipif(obstacle() is not None, reason=obstacle() or "")


def alive(pid: int) -> bool:
    return namespaces.started_ticks(pid) is not None


def assert_gone(hosts: list[str], pids: list[int]) -> None:
    assert len(hosts) >= 2 and not set(hosts) & set(namespaces.existing())
    assert not [pid for pid in pids if alive(pid)]


def wait_until_gone(pids: list[int]) -> None:
    """Orphans are collected by init, a moment after their end."""
    wait_until(lambda: not any(map(alive, pids)))


@needs_root
def test_path_is_as_slow_as_asked():
    """What no machine can be too slow for; `python -m testbed check` measures the rest."""
    back = Path(rate_mbps=10, delay_ms=30)
    with Testbed([Path(rate_mbps=20, delay_ms=20, back=back)]) as bed:
        start_listener(bed, 1, towards=0)
        trips = ask(bed, "round_trips", count=20)
        assert trips["least"] >= 50  # no message is early, ever
        started, before = time.monotonic(), bed.counters(0)["directions"]
        rates = ask(bed, "rates", do="both", warmup=0.5, seconds=1.0)
        after, seconds = bed.counters(0)["directions"], time.monotonic() - started
        for index, shape in enumerate(bed.paths[0].shapes()):
            # A law, not an estimate: what the link takes on in a time is the rate, what the queue holds, and the packet that fills it.
            carried = after[index]["bytes"] - before[index]["bytes"]
            assert carried <= shape["rate_mbps"] * 1e6 / 8 * seconds + shape["queue_kb"] * 1e3 + 1500
            assert after[index]["lost"] == 0
            assert carried > 0
        assert rates["there"] > 0 and rates["back"] > 0


@needs_root
def test_hosts_share_nothing_but_their_path():
    with Testbed([Path(rate_mbps=20), Path(rate_mbps=20)]) as bed:
        devices = [
            {line.split(": ")[1] for line in bed.run(host, ["ip", "-o", "link"], stdout=subprocess.PIPE, text=True).stdout.splitlines()}
            for host in range(3)
        ]
        assert [found - {"lo"} for found in devices] == [{"path0"}, {"path0", "path1"}, {"path1"}]
        route = ["ip", "route", "get"]
        assert "dev path0" in bed.run(0, [*route, bed.address(1, towards=0)], stdout=subprocess.PIPE, text=True).stdout
        for elsewhere in (bed.address(2, towards=1), "192.0.2.1"):
            with pytest.raises(subprocess.CalledProcessError):
                bed.run(0, [*route, elsewhere], stderr=subprocess.DEVNULL)
        start_listener(bed, 1, towards=0)
        bed.forwarders[0].kill()  # without the forwarder there is no other way
        bed.forwarders[0].wait()
        with pytest.raises(subprocess.CalledProcessError):
            ask(bed, "round_trips", count=1)


@needs_root
def test_routed_chain_adds_up_the_delays():
    with Testbed([Path(rate_mbps=50, delay_ms=10), Path(rate_mbps=50, delay_ms=15)], routed=True) as bed:
        start_listener(bed, 2, towards=1)
        dial = [sys.executable, "-I", "-S", str(BENCH / "testbed" / "peer.py"), "round_trips", bed.address(2, towards=1), '{"count": 5}']
        least = float(bed.run(0, dial, stdout=subprocess.PIPE, text=True).stdout.split('"least": ')[1].split(",")[0])
        assert least >= 50


@needs_root
def test_loss_is_random_and_close_to_what_was_asked():
    with Testbed([Path(rate_mbps=50, loss=0.1, back=Path(rate_mbps=50))]) as bed:
        start_listener(bed, 1, towards=0)
        ask(bed, "datagram_loss", count=2000, per_second=2000)
        there, back = bed.counters(0)["directions"]
        assert there["packets"] >= 2000 and 0.06 < there["lost"] / there["packets"] < 0.14  # six standard deviations
        assert back["lost"] == 0


@needs_root
@pytest.mark.parametrize("failing", [False, True])
def test_teardown_leaves_nothing(failing: bool):
    hosts, pids, bed = [], [], Testbed([Path(rate_mbps=20)])
    try:
        with bed:
            hosts = list(bed.hosts)
            # A program that leaves a child behind, in a session of its own.
            bed.popen(1, ["sh", "-c", "setsid sleep 300 & sleep 300"])
            wait_until(lambda: len(namespaces.processes(hosts[1])) >= 4)  # sh, two sleeps, the forwarder
            pids = [*namespaces.processes(hosts[1]), bed.forwarders[0].pid]
            assert len(set(pids)) >= 4
            if failing:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert failing
    wait_until_gone(pids)
    assert_gone(hosts, pids)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


OWNER = """
import signal, subprocess, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background with SIGINT ignored
from testbed import Path, Testbed
with Testbed([Path(rate_mbps=20)]) as bed:
    process = bed.popen(0, ["sleep", "300"])
    print(*bed.hosts, process.pid, bed.forwarders[0].pid, flush=True)
    time.sleep(300)
"""


@needs_root
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signals_leave_nothing_and_clean_removes_a_killed_run(number: signal.Signals):
    environment = {**os.environ, "PYTHONPATH": str(BENCH)}
    with Testbed([Path(rate_mbps=20)]) as other:  # a living run that `clean` must not touch
        owner = subprocess.Popen(
            [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        assert owner.stdout is not None
        words = owner.stdout.readline().split()
        hosts, pids = words[:2], [int(word) for word in words[2:]]
        owner.send_signal(number)
        assert owner.wait(HANG) != 0
        owner.stdout.close()
        if number == signal.SIGKILL:
            assert set(hosts) <= set(namespaces.stale())
            done = subprocess.run(
                [sys.executable, "-m", "testbed", "clean"], cwd=BENCH, stdout=subprocess.PIPE, text=True, check=True, timeout=HANG
            )
            assert all(f"removed {host}" in done.stdout for host in hosts)
        wait_until_gone(pids)
        assert_gone(hosts, pids)
        assert set(other.hosts) <= set(namespaces.existing())


@needs_root
def test_failed_start_leaves_nothing():
    bed = Testbed([Path(rate_mbps=20)], sysctls={"net.ipv4.tcp_congestion_control": "no such thing"})
    before = namespaces.existing()
    with pytest.raises(ValueError, match="tcp_congestion_control"), bed:
        pass
    assert namespaces.existing() == before


@pytest.mark.parametrize(
    "wrong",
    [{"rate_mbps": 0}, {"delay_ms": -1}, {"jitter_ms": -1}, {"loss": 1.0}, {"loss": 50}, {"queue_kb": 1}, {"rate_mbps": float("nan")}],
)
def test_impossible_path_is_refused_by_name(wrong: dict[str, float]):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Path(**{"rate_mbps": 80, **wrong})


def test_only_neighbours_have_addresses():
    bed = Testbed([Path(rate_mbps=80)] * 2)
    assert bed.address(0, towards=1) != bed.address(1, towards=0)
    for pair in ((0, 2), (0, 0), (2, 3), (-1, 0)):
        with pytest.raises(ValueError, match="not neighbours"):
            bed.address(*pair)


def test_forwarder_paces_delays_drops_and_keeps_order():
    """One direction over pipes instead of devices: 8 Mbit/s is a packet of 1000 bytes per ms."""
    source, feed = os.pipe2(os.O_NONBLOCK | os.O_DIRECT)  # packet mode: a read returns one write
    shape = {"rate_mbps": 8.0, "delay_ms": 40.0, "jitter_ms": 20.0, "loss": 0.0, "queue_kb": 5.0}
    direction = Direction(source, feed, shape, "seed")
    try:
        for number in range(10):
            os.write(feed, bytes([number]) * 1000)
        started = time.monotonic()
        direction.take()
        ended = time.monotonic()
    finally:
        os.close(source)
        os.close(feed)
    kept = [packet[0] for _, packet in direction.flying]
    dues = [due for due, _ in direction.flying]
    assert kept[:6] == [0, 1, 2, 3, 4, 5]
    assert direction.dropped == 10 - len(kept) and kept == sorted(kept)
    if ended - started < 0.001:  # else the queue has drained a packet meanwhile
        assert direction.dropped == 4
    assert dues == sorted(dues)
    assert all(due >= started + 0.001 * (place + 1) + 0.040 for place, due in enumerate(dues))
    assert dues[-1] <= ended + 0.001 * len(dues) + 0.060
