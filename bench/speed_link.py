"""Measure one link on loopback with TLS, each end in its own process: throughput one way and both ways, and latency of an 80 KB frame.

    python bench/speed_link.py [--megabytes 500] [--profile open]

Absolute figures depend on what else runs; the reference in the last lines is a plain blocking TLS socket in the same run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import ssl
import statistics
import tempfile
import threading
import time
from pathlib import Path

from thinwire.config.profiles import find_profile
from thinwire.link.contract import Contract, Flow, TensorForm
from thinwire.link.endpoint import Endpoint
from thinwire.link.frame import Channel, Dtype, Frame, Kind
from thinwire.link.hello import Terms
from thinwire.link.identity import Identity, make_identity
from thinwire.link.link import Link
from thinwire.link.listener import Listener
from thinwire.link.peer import Worker, WorkerId
from thinwire.link.tcp.contexts import client_context, server_context

LEFT, RIGHT = WorkerId(0, 0), WorkerId(0, 1)
FRAME = 80 * 1000
FLOW = Flow.constant((TensorForm(Dtype.RAW, (FRAME,), FRAME),), microbatches=1)
CONTRACT = Contract(FLOW, FLOW)
ROUNDS = 500


def data_frame(step: int, payload: bytes) -> Frame:
    return Frame.make(Kind.DATA, payload, step=step, dims=(FRAME,))


class End:
    """One process's link with its step counters."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.sent = 0
        link.wait_open(30)

    def send(self, count: int) -> None:
        payload = bytes(FRAME)
        for _ in range(count):
            self.link.send(data_frame(self.sent, payload), 60)
            self.sent += 1

    def receive(self, count: int) -> None:
        for _ in range(count):
            self.link.receive(Channel.BOUNDARY, 60)

    def signal(self) -> None:
        self.link.send(Frame.make(Kind.STEP), 60)

    def await_signal(self) -> None:
        self.link.receive(Channel.CONTROL, 60)


def right_end(address: tuple[str, int], left: str, identity: Identity, frames: int, profile: str) -> None:
    """Run the dialling side."""
    worker = Worker(LEFT, left, f"{address[0]}:{address[1]}")
    link = Link.connect(worker, Endpoint(identity), Terms("speed", {}, RIGHT), CONTRACT, profile=find_profile(profile))
    end = End(link)
    began = time.process_time()
    end.receive(frames)
    report_cpu("one way, receiver", frames, time.process_time() - began)
    end.signal()
    sender = threading.Thread(target=end.send, args=(frames,))
    sender.start()
    end.receive(frames)
    sender.join()
    end.signal()
    for _ in range(ROUNDS):
        end.receive(1)
        end.send(1)
    end.await_signal()
    link.close()


def report(name: str, size: int, seconds: float) -> None:
    print(f"{name:32s} {size * 8 / seconds / 1e9:6.2f} Gbit/s")


def report_cpu(name: str, frames: int, seconds: float) -> None:
    """Print what a frame costs the processor, which says more than the rate where other processes run."""
    print(f"{name:32s} {seconds / frames * 1e6:6.0f} us of processor time per 80 KB frame", flush=True)


def left_end(end: End, frames: int) -> None:
    """Run the listening side and print."""
    started, began = time.perf_counter(), time.process_time()
    end.send(frames)
    end.await_signal()
    report_cpu("one way, sender", frames, time.process_time() - began)
    report("one way", frames * FRAME, time.perf_counter() - started)
    started = time.perf_counter()
    sender = threading.Thread(target=end.send, args=(frames,))
    sender.start()
    end.receive(frames)
    sender.join()
    end.await_signal()
    report("both ways, per direction", frames * FRAME, time.perf_counter() - started)
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        end.send(1)
        end.receive(1)
        times.append((time.perf_counter() - started) / 2)
    quantiles = statistics.quantiles(times, n=20)
    print(f"{'80 KB frame, one way':32s} {statistics.median(times) * 1e3:6.3f} ms median, {quantiles[-1] * 1e3:.3f} ms 95 %")
    end.signal()


def read_exactly(sock: ssl.SSLSocket, size: int) -> None:
    while size > 0:
        size -= len(sock.recv(size))


def reference_sink(address: tuple[str, int], left: str, identity: Identity) -> None:
    with client_context(identity, left).wrap_socket(socket.create_connection(address)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(ROUNDS):
            read_exactly(sock, FRAME)
            sock.sendall(bytes(FRAME))
        while sock.recv(2**18):
            pass


def reference(left: Identity, right: Identity, frames: int) -> None:
    """Time the same bytes through a blocking TLS socket."""
    server = socket.create_server(("127.0.0.1", 0))
    process = multiprocessing.Process(target=reference_sink, args=(server.getsockname(), left.certificate, right))
    process.start()
    accepted, _ = server.accept()
    with server_context(left, [right.certificate]).wrap_socket(accepted, server_side=True) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        payload = bytes(FRAME)
        times = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            sock.sendall(payload)
            read_exactly(sock, FRAME)
            times.append((time.perf_counter() - started) / 2)
        print(f"{'plain ssl.SSLSocket, 80 KB':32s} {statistics.median(times) * 1e3:6.3f} ms median")
        started = time.perf_counter()
        for _ in range(frames):
            sock.sendall(payload)
        sock.shutdown(socket.SHUT_WR)
        process.join()
        report("plain ssl.SSLSocket, one way", frames * FRAME, time.perf_counter() - started)
    server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--profile", default="open")
    options = parser.parse_args()
    frames = options.megabytes * 10**6 // FRAME
    multiprocessing.set_start_method("spawn")
    with tempfile.TemporaryDirectory() as folder:
        left, right = (make_identity(Path(folder) / name, name) for name in ("left", "right"))
        listener = Listener(("127.0.0.1", 0), Endpoint(left), [Worker(RIGHT, right.certificate)])
        process = multiprocessing.Process(target=right_end, args=(listener.address, left.certificate, right, frames, options.profile))
        process.start()
        profile = find_profile(options.profile)
        link = Link.listen(listener, Worker(RIGHT, right.certificate), Terms("speed", {}, LEFT), CONTRACT, profile=profile)
        left_end(End(link), frames)
        process.join()
        link.close()
        listener.close()
        print(f"congestion control {link.congestion}; {ssl.OPENSSL_VERSION}")
        reference(left, right, frames)


if __name__ == "__main__":
    main()
