"""Both ends of a measurement over plain sockets; started in the hosts by `check.py`, no command for people.

Times are taken where the bytes arrive. The listener serves one connection per request and dies with the bed.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import threading
import time

PORT = 7700
CHUNK = bytes(65536)
TIMEOUT_SECONDS = 30.0
DATAGRAM = bytes(200)


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("the other end closed the connection")
        data += part
    return data


def push(connection: socket.socket, seconds: float) -> None:
    """Send as fast as TCP takes it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        connection.send(CHUNK)
    connection.shutdown(socket.SHUT_WR)


def drain(connection: socket.socket, warmup: float, seconds: float) -> float:
    """Return the Mbit/s that arrive in a window behind the start-up, and read on to the end.

    TCP delivers in order: a gap repaired inside the window releases what waited behind it, so a rate can come out above the link's.
    """
    buffer = bytearray(1 << 18)
    opened = time.monotonic() + warmup
    counted, first, last = 0, 0.0, 0.0
    while count := connection.recv_into(buffer):
        now = time.monotonic()
        if not first:
            if now >= opened:
                first = last = now  # what arrived by now is not counted
        elif now <= opened + seconds:
            counted, last = counted + count, now
    return counted * 8e-6 / (last - first) if last > first else 0.0


def serve(connection: socket.socket) -> None:
    """Answer one request: {"do": echo | take | give, ...} on one line of 256 bytes."""
    connection.settimeout(TIMEOUT_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        request = json.loads(receive_exactly(connection, 256))
        if request["do"] == "echo":
            while data := connection.recv(64):
                connection.sendall(data)
        elif request["do"] == "give":
            push(connection, request["warmup"] + request["seconds"])
        else:
            connection.sendall(json.dumps(drain(connection, request["warmup"], request["seconds"])).encode())


def choose_congestion(connection: socket.socket, name: str | None) -> None:
    """Choose per socket: the default of a namespace can only be one of tcp_allowed_congestion_control."""
    if name:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())


def listen(address: str, congestion: str | None = None) -> None:
    """Serve connections and count datagrams."""
    listener = socket.create_server((address, PORT))
    choose_congestion(listener, congestion)  # an accepted connection inherits it
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind((address, PORT))
    threading.Thread(target=count_datagrams, args=(datagrams,), daemon=True).start()
    print("listening", flush=True)
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


def count_datagrams(datagrams: socket.socket) -> None:
    seen = 0
    while True:
        data, sender = datagrams.recvfrom(2048)
        if data == b"how many":
            datagrams.sendto(str(seen).encode(), sender)
        else:
            seen += 1


def request(address: str, congestion: str | None = None, **what: object) -> socket.socket:
    connection = socket.create_connection((address, PORT), timeout=TIMEOUT_SECONDS)
    choose_congestion(connection, congestion)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(json.dumps(what).encode().ljust(256))
    return connection


def round_trips(address: str, count: int) -> dict[str, float]:
    """Return the least and the middle round-trip time of small messages, in ms."""
    with request(address, do="echo") as connection:
        found = []
        for _ in range(count):
            started = time.monotonic()
            connection.sendall(bytes(64))
            receive_exactly(connection, 64)
            found.append(1e3 * (time.monotonic() - started))
    return {"least": min(found), "median": statistics.median(found), "most": max(found)}


def rates(address: str, do: str, warmup: float, seconds: float, congestion: str | None = None) -> dict[str, float]:
    """Return the Mbit/s of a bulk transfer there (`take`), back (`give`) or both at once."""
    found: dict[str, float] = {}

    def there() -> None:
        with request(address, congestion, do="take", warmup=warmup, seconds=seconds) as connection:
            push(connection, warmup + seconds)
            found["there"] = json.loads(connection.recv(64))

    def back() -> None:
        with request(address, congestion, do="give", warmup=warmup, seconds=seconds) as connection:
            found["back"] = drain(connection, warmup, seconds)

    works = {"take": [there], "give": [back], "both": [there, back]}[do]
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def datagram_loss(address: str, count: int, per_second: float) -> float:
    """Return the share of datagrams that did not arrive."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        started = time.monotonic()
        for index in range(count):
            datagrams.sendto(DATAGRAM, (address, PORT))
            time.sleep(max(0.0, started + (index + 1) / per_second - time.monotonic()))
        time.sleep(2.0)  # the longest path here and its jitter
        datagrams.settimeout(2.0)
        for _ in range(10):  # the question can be lost too
            datagrams.sendto(b"how many", (address, PORT))
            try:
                return 1 - int(datagrams.recv(64)) / count
            except TimeoutError:
                continue
    raise TimeoutError(f"{address} does not answer datagrams")


def main() -> None:
    what, address, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    if what == "listen":
        listen(address, **options)
    measure = {"round_trips": round_trips, "rates": rates, "datagram_loss": datagram_loss}[what]
    print(json.dumps(measure(address, **options)))


if __name__ == "__main__":
    main()
