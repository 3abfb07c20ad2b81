"""Feed rubbish to the frame parser and to a listening link: no crash, no hang, memory flat.

    python bench/fuzz_link.py [--parser 1000000] [--listener 10000]

A third of the connections to the listener are strangers, the others hold the right certificate and send damaged frames. Whatever else
than a named refusal comes out ends the run with its traceback. Memory is the resident size of this process after each tenth.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import socket
import ssl
import tempfile
import threading
import time
from pathlib import Path

from thinwire.link.contract import Contract, Cursor, Flow, TensorForm
from thinwire.link.endpoint import Endpoint
from thinwire.link.errors import ProtocolError
from thinwire.link.frame import HEADER_BYTES, MOST_PART_BYTES, PART_BYTES, Channel, Frame, Kind, Parser, encode
from thinwire.link.hello import Terms, make_hello
from thinwire.link.identity import make_identity
from thinwire.link.inbox import Inbox
from thinwire.link.link import Link
from thinwire.link.listener import Listener
from thinwire.link.meter import LinkMeter
from thinwire.link.options import LinkOptions
from thinwire.link.peer import Worker, WorkerId
from thinwire.link.tcp.contexts import client_context

LEFT, RIGHT = WorkerId(0, 0), WorkerId(0, 1)
OPTIONS = LinkOptions(credit_frames=8, establish_seconds=2.0, abort_seconds=0.5, close_seconds=1.0, reconnect_seconds=3600.0)
CONTRACT = Contract(incoming=Flow.constant((TensorForm(0, (), 40_000, exact=False),), 2))
TERMS = Terms("fuzz", {"model.width": 64}, RIGHT)


def resident() -> float:
    """Return the resident memory in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def valid_parts() -> list[bytes]:
    """Encode the beginning of a stream that the contract allows."""
    first = Frame.make(Kind.DATA, bytes(500), sequence=1)
    step = Frame.make(Kind.STEP, b"12345678", sequence=2)
    second = Frame.make(Kind.DATA, bytes(PART_BYTES), sequence=3, microbatch=1)
    return [encode(frame) for frame in (first, step, second)]


def damage(data: bytearray, generator: random.Random) -> bytes:
    """Change, drop, repeat or cut bytes; most damage falls on headers, which decide."""
    for _ in range(generator.randrange(4)):
        at = generator.randrange(min(len(data), HEADER_BYTES) if generator.random() < 0.7 else len(data))
        way = generator.random()
        if way < 0.7:
            data[at] = generator.choice((0, 1, 255, generator.randrange(256)))
        elif way < 0.85:
            del data[at : at + generator.randrange(1, 20)]
        else:
            data[at:at] = data[: generator.randrange(1, 100)]
        if not data:
            return b""
    return bytes(data)


def fuzz_parser(count: int, generator: random.Random) -> None:
    """Run damaged streams through parser, contract and inbox."""
    parts = valid_parts()
    outcomes: collections.Counter[str] = collections.Counter()
    memory = []
    started = time.perf_counter()
    for number in range(count):
        stream = bytearray().join(parts[: generator.choices((1, 2, 3), (20, 10, 1))[0]])
        data = damage(stream, generator)
        inbox = Inbox(Cursor(CONTRACT.incoming, CONTRACT), OPTIONS, LinkMeter())
        parser = Parser(inbox.check)
        cut = generator.randrange(len(data) + 1)
        try:
            for piece in (data[:cut], data[cut:]):
                for frame in parser.feed(piece):
                    inbox.accept(frame, 0.0)
            outcomes["accepted or unfinished"] += 1
        except ProtocolError as error:
            outcomes[error.field] += 1
        assert parser.held_bytes <= MOST_PART_BYTES + HEADER_BYTES
        if (number + 1) % max(1, count // 10) == 0:
            memory.append(resident())
    report("parser", count, time.perf_counter() - started, outcomes, memory)


def fuzz_listener(count: int, generator: random.Random) -> None:
    """Attack a listening link, which is made anew whenever a peer has broken it."""
    with tempfile.TemporaryDirectory() as folder:
        left, right = (make_identity(Path(folder) / name, name) for name in ("left", "right"))
        worker = Worker(RIGHT, right.certificate)
        listener = Listener(("127.0.0.1", 0), Endpoint(left), [worker], OPTIONS)
        context = client_context(right, left.certificate)
        hello = encode(Frame.make(Kind.HELLO, make_hello(TERMS, 0, OPTIONS, 0, ((0, 0),) * len(Channel)).encode()))
        outcomes: collections.Counter[str] = collections.Counter()
        memory = []
        started = time.perf_counter()
        link = None
        for number in range(count):
            if link is None or link.error is not None or link.state == "closed":
                if link is not None:
                    outcomes[getattr(link.error, "field", None) or type(link.error).__name__] += 1
                    link.close()
                link = Link.listen(listener, worker, Terms("fuzz", {"model.width": 64}, LEFT), CONTRACT, options=OPTIONS)
            try:
                if number % 3 == 0:
                    attack_as_stranger(listener.address, generator)
                else:
                    attack_as_peer(listener.address, context, hello, generator)
            except OSError:
                outcomes["connection refused or reset"] += 1
            if (number + 1) % max(1, count // 10) == 0:
                memory.append(resident())
        if link is not None:
            link.abort("the end")
            link.close()
        listener.close()
        assert threading.active_count() == 1, threading.enumerate()
        report("listening link", count, time.perf_counter() - started, outcomes, memory)


def attack_as_stranger(address: tuple[str, int], generator: random.Random) -> None:
    with socket.create_connection(address) as sock:
        sock.sendall(generator.choice((b"\x16\x03\x01", b"thwr", b"")) + generator.randbytes(generator.randrange(300)))


def attack_as_peer(address: tuple[str, int], context: ssl.SSLContext, hello: bytes, generator: random.Random) -> None:
    parts = valid_parts()
    way = generator.random()
    if way < 0.3:
        data = damage(bytearray(hello), generator)
    elif way < 0.4:
        data = damage(bytearray().join(parts), generator)
    else:
        data = hello + damage(bytearray().join(parts[: generator.randrange(1, 4)]), generator)
    with context.wrap_socket(socket.create_connection(address)) as sock:
        sock.settimeout(10)
        sock.sendall(data)
        sock.recv(2**16)


def report(name: str, count: int, seconds: float, outcomes: collections.Counter[str], memory: list[float]) -> None:
    print(f"{name}: {count} inputs in {seconds:.0f} s")
    print("  " + ", ".join(f"{field} {number}" for field, number in outcomes.most_common()))
    print("  resident MB after each tenth: " + " ".join(f"{value:.1f}" for value in memory))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parser", type=int, default=1_000_000)
    parser.add_argument("--listener", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    fuzz_parser(options.parser, random.Random(options.seed))
    fuzz_listener(options.listener, random.Random(options.seed))


if __name__ == "__main__":
    main()
