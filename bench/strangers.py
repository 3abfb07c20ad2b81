"""Strangers flood a listener while the true peer's connection is cut: how soon is it back?

    sudo .venv/bin/python bench/strangers.py [--rate 200] [--cuts 5] [--delay-ms 100]

Two hosts of the testbed with 100 ms in each direction. In one a link listens, in the other are its peer and the strangers, who connect
`--rate` times a second and hold what they get. Idle ones say nothing; talking ones send the beginning of a TLS handshake and no more;
repeating ones have read the peer's own word off the line (`link/tcp/knock.py`) and begin with it. They come from the peer's own
address, or from 250 others. For each kind the peer's connection is broken `--cuts` times; the figure is the time until the link is open
again. About three minutes; Linux and root, as all of the testbed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import selectors
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path as File
from typing import Any

from rich.console import Console
from rich.table import Table

from testbed.bed import Testbed
from testbed.namespaces import ip
from testbed.path import Path
from thinwire.link.contract import Contract
from thinwire.link.endpoint import Endpoint
from thinwire.link.hello import Terms
from thinwire.link.identity import load_identity, make_identity
from thinwire.link.link import Link
from thinwire.link.listener import Listener
from thinwire.link.peer import Worker, WorkerId
from thinwire.link.tcp.knock import knock

GOAL_SECONDS = 5.0
LONGEST_SECONDS = 20.0
"""Given up as "not back" after this."""
PORT = 9000
MOST_AT_ONCE, MOST_HELD = 100, 8000
CROWD = "198.18.1"
"""The network of strangers with many addresses."""
KINDS = {
    "nobody": ("idle", 0),
    "idle, the peer's address": ("idle", 1),
    "idle, 250 addresses": ("idle", 250),
    "talking, the peer's address": ("talking", 1),
    "talking, 250 addresses": ("talking", 250),
    "repeating, the peer's address": ("repeating", 1),
    "repeating, 250 addresses": ("repeating", 250),
}
ENDS = (WorkerId(0, 0), WorkerId(0, 1))


def terms(worker_id: WorkerId) -> Terms:
    return Terms("strangers", {}, worker_id)


def listen(keys: File, address: str) -> None:
    """Be the worker that is attacked, until the standard input ends."""
    peer = Worker(ENDS[1], load_identity(keys / "peer").certificate)
    listener = Listener((address, PORT), Endpoint(load_identity(keys / "listener")), [peer])
    link = Link.listen(listener, peer, terms(ENDS[0]), Contract())
    print("listening", flush=True)
    sys.stdin.read()
    link.abort("the bench is over")
    link.close()
    listener.close()


def be_peer(keys: File, address: str) -> None:
    """Be the true peer: break the connection at each line of the standard input, and say after how many seconds the link is open again."""
    target = Worker(ENDS[0], load_identity(keys / "listener").certificate, f"{address}:{PORT}")
    link = Link.connect(target, Endpoint(load_identity(keys / "peer")), terms(ENDS[1]), Contract())
    link.wait_open(LONGEST_SECONDS)
    print("open", flush=True)
    for _ in sys.stdin:
        met, started = link.meter.connections, time.monotonic()
        link.reset_connection()
        while link.meter.connections == met and time.monotonic() < started + LONGEST_SECONDS:
            time.sleep(0.005)
        back = link.meter.connections > met
        print(json.dumps(time.monotonic() - started if back else None), flush=True)
    link.abort("the bench is over")
    link.close()


def attack(address: str, rate: float, opening: bytes, addresses: int) -> None:
    """Connect again and again, begin with some bytes and hold the connections, for as long as the standard input is open."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held: deque[socket.socket] = deque()
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    count, started = 0, time.monotonic()
    print("attacking", flush=True)
    while True:
        for key, _ in selector.select(max(0.0, started + count / rate - time.monotonic())):
            if key.fileobj is sys.stdin:
                return
            assert isinstance(key.fileobj, socket.socket)
            selector.unregister(key.fileobj)
            if not key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                key.fileobj.send(opening)
        for _ in range(max(0, min(MOST_AT_ONCE, int((time.monotonic() - started) * rate) - count))):
            stranger = socket.socket()
            stranger.setblocking(False)
            if addresses > 1:
                stranger.bind((f"{CROWD}.{1 + count % addresses}", 0))
            stranger.connect_ex((address, PORT))
            if opening:
                selector.register(stranger, selectors.EVENT_WRITE)
            held.append(stranger)
            count += 1
        while len(held) > min(20 * rate, MOST_HELD):
            held.popleft().close()


def opening_bytes(manner: str, keys: File) -> bytes:
    """Return what strangers of one kind begin with."""
    if manner == "idle":
        return b""
    listener = load_identity(keys / "listener").certificate
    return client_hello(knock(load_identity(keys / "peer"), listener, calling=True) if manner == "repeating" else None)


def client_hello(name: str | None) -> bytes:
    """Return the first bytes of a handshake: as anyone can send them, or with a name that was read off the line."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


def start(bed: Testbed, host: int, role: str, *words: str) -> subprocess.Popen[Any]:
    """Run a role of this file in a host and wait until it is ready."""
    command = [sys.executable, __file__, "--role", role, *words]
    process = bed.popen(host, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if not process.stdout.readline():
        raise ValueError(f"the {role} did not start: {process.stderr.read()}")
    return process


def end(process: subprocess.Popen[Any]) -> str:
    """End a role; return what it said to people."""
    return process.communicate(timeout=30)[1]


def measure(bed: Testbed, keys: File, kind: str, rate: float, cuts: int) -> dict[str, Any]:
    """Return how long the peer was away after each cut (None: it did not come back), and how many lines the listener logged."""
    address = bed.address(0, towards=1)
    manner, addresses = KINDS[kind]
    worker = start(bed, 0, "listen", "--keys", str(keys), "--address", address)
    peer = start(bed, 1, "peer", "--keys", str(keys), "--address", address)
    words = ("--keys", str(keys), "--address", address, "--rate", str(rate), "--addresses", str(addresses), "--manner", manner)
    strangers = start(bed, 1, "attack", *words) if addresses else None
    began = time.monotonic()
    seconds: list[float | None] = []
    for _ in range(cuts):
        time.sleep(2.0)  # the listener is as full as it gets
        peer.stdin.write("cut\n")
        peer.stdin.flush()
        answer = peer.stdout.readline()
        if not answer:
            break
        seconds.append(json.loads(answer))
        if seconds[-1] is None:
            break
    lasted = time.monotonic() - began
    if strangers is not None:
        end(strangers)
    end(peer)
    return {"kind": kind, "rate": rate, "back_seconds": seconds, "log_lines_per_second": len(end(worker).splitlines()) / lasted}


def show(results: list[dict[str, Any]]) -> bool:
    """Print the table; return whether the peer was always back in time."""
    table = Table("strangers", "connects/s", "cuts", "back after, median (s)", "longest (s)", "log lines/s", f"under {GOAL_SECONDS:.0f} s")
    fine = True
    for result in results:
        seconds = result["back_seconds"]
        good = bool(seconds) and all(each is not None and each < GOAL_SECONDS for each in seconds)
        fine &= good
        times = sorted(float("inf") if each is None else each for each in seconds) or [float("inf")]
        words = [f"{times[len(times) // 2]:.2f}", f"{times[-1]:.2f}", f"{result['log_lines_per_second']:.1f}"]
        rate = f"{result['rate']:.0f}" if KINDS[result["kind"]][1] else "0"
        table.add_row(result["kind"], rate, str(len(seconds)), *words, "yes" if good else "NO")
    Console().print(table)
    return fine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=200.0, help="strangers per second")
    parser.add_argument("--cuts", type=int, default=5)
    parser.add_argument("--delay-ms", type=float, default=100.0, help="one way")
    parser.add_argument("--kind", choices=KINDS, help="one kind only")
    for name in ("role", "keys", "address"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--addresses", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--manner", default="idle", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role == "attack":
        attack(given.address, given.rate, opening_bytes(given.manner, File(given.keys)), given.addresses)
    elif given.role:
        {"listen": listen, "peer": be_peer}[given.role](File(given.keys), given.address)
    else:
        with tempfile.TemporaryDirectory() as folder, Testbed([Path(rate_mbps=80, delay_ms=given.delay_ms)]) as bed:
            for name in ("listener", "peer"):
                make_identity(File(folder) / name, name)
            device = bed.interface(0, towards=1)
            ip("-n", bed.hosts[0], "route", "add", f"{CROWD}.0/24", "dev", device)
            for number in range(1, 251):
                ip("-n", bed.hosts[1], "address", "add", f"{CROWD}.{number}/32", "dev", bed.interface(1, towards=0))
            kinds = [given.kind] if given.kind else list(KINDS)
            fine = show([measure(bed, File(folder), kind, given.rate, given.cuts) for kind in kinds])
        sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
