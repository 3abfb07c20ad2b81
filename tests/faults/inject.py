"""Faults on purpose, at named points of a worker's life: what `run_workers` is given instead of the plain task of training.

A fault strikes once: a file with its name says that it has. Points are places in the package that every step passes:

    forward      before a stage computes a microbatch
    backward     while it sends a gradient to the stage before
    optimizer    between the first and the last parameter of an update
    write        between the tensors and the manifest of a checkpoint
    exchange     while it swaps messages with the same stage of other replicas
    restore      before all stages vote for a checkpoint: once per epoch, when the links are open

What it does there (`amount` is in seconds, unless something else stands here):

    kill         SIGKILL
    freeze       SIGSTOP for good
    stuck        the thread that computes never goes on, those beside it do
    stuck in C   likewise, where Python does not even notice a signal
    stuck whole  likewise, and no other thread of Python's goes on either
    doze         SIGSTOP, and SIGCONT after `amount`
    reset        break every TCP connection of this worker
    cut          for `amount` nothing leaves this worker and nothing comes in, and no connection says so
    cut out      likewise, only of what leaves
    cut in       likewise, only of what comes in
    hold         wait until the file `go` is there
    rate         the emulated line has from now on `amount` Mbit/s
    flip sent    one bit of the next frame is another one, before it is encrypted
    flip read    one bit of the next frame that comes in is another one, after it was decrypted
    flip cipher  one bit of the next encrypted bytes that come in is another one
    flip file    one bit of this stage's newest checkpoint is another one, then SIGKILL
    full         the disk is full for the next `amount` checkpoints of this stage
    minute       this stage has trained for a minute: from now on it wants a first checkpoint
    fill         the disk that holds the run folder is really full from now on
    empty        there is room again
    clock        all clocks of the day of this and of later processes jump by `amount`
    clock kill   likewise, then SIGKILL
    lie ...      what this worker tells its neighbours is wrong, see `LIES`
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from patience import wait_until
from thinwire.cli import main as cli
from thinwire.cluster import launch
from thinwire.cluster.children import Hear
from thinwire.cluster.membership import Membership
from thinwire.cluster.neighbours import Neighbours
from thinwire.cluster.supervisor import run_workers
from thinwire.cluster.worker_process import Say
from thinwire.link.connection import Connection
from thinwire.link.frame import Frame, Kind
from thinwire.link.link import Link
from thinwire.link.peer import WorkerId
from thinwire.link.tcp.stream import TlsStream
from thinwire.pipeline.backend import MESSAGE_BYTES, Port
from thinwire.pipeline.control import Control
from thinwire.run import keeping
from thinwire.run.command import TrainCommand, parse_train
from thinwire.run.stop import Stop

POINTS = ("forward", "backward", "optimizer", "write")
POLL_SECONDS = 0.02
"""How often a worker looks for orders from outside, and a cut connection whether it still is."""
GO = "go"
"""File that lets a worker go on that stands still."""
CLOCK = "clock"
"""File with the seconds by which the clock has jumped."""


@dataclass(frozen=True)
class Fault:
    """Strike a stage the `number`-th time that it passes a point."""

    stage: int
    point: str
    number: int = 1
    action: str = "kill"
    amount: float = 0.0
    replica: int = 0

    @property
    def name(self) -> str:
        return f"{f'replica-{self.replica}-' if self.replica else ''}{self.stage}-{self.point}-{self.number}-{self.action}".replace(
            " ", "_"
        )


class Scene:
    """A worker process and the ways to harm it; the process exists for one run."""

    def __init__(self, stage: int, folder: Path, run: Path, seed: int = 0, replica: int = 0) -> None:
        self.stage, self.folder, self.run, self.replica = stage, folder, run, replica
        self.random = random.Random(1000 * seed + stage)
        self.links: list[Link] = []
        self.cut_until = {"out": 0.0, "in": 0.0}
        self.lie: str | None = None
        self.flip: str | None = None
        self.unwritten = 0
        self.actions: dict[str, Callable[[float], None]] = {
            "kill": lambda amount: self._signal(signal.SIGKILL),
            "freeze": lambda amount: self._signal(signal.SIGSTOP),
            "stuck": lambda amount: threading.Event().wait(),
            "stuck in C": lambda amount: deadlock(ctypes.CDLL(None)),
            "stuck whole": lambda amount: deadlock(ctypes.PyDLL(None)),  # keeps Python's lock
            "doze": self._doze,
            "reset": lambda amount: self._reset(),
            "cut": lambda amount: self._cut(("out", "in"), amount),
            "cut out": lambda amount: self._cut(("out",), amount),
            "cut in": lambda amount: self._cut(("in",), amount),
            "hold": lambda amount: wait_until((self.folder / GO).exists),
            "rate": self._rate,
            "flip sent": lambda amount: self._flip("sent"),
            "flip read": lambda amount: self._flip("read"),
            "flip cipher": lambda amount: self._flip("cipher"),
            "flip file": lambda amount: self._flip_file(),
            "full": self._full,
            "minute": lambda amount: setattr(keeping, "FIRST_SECONDS", 0.0),
            "fill": lambda amount: self._fill(),
            "empty": lambda amount: (self.run / "filler").unlink(),
            "clock": self._jump,
            "clock kill": lambda amount: (self._jump(amount), self._signal(signal.SIGKILL)),
            **{f"lie {name}": lambda amount, name=name: self._lie(name) for name in LIES},
        }

    def strike(self, fault: Fault) -> None:
        """Do it, once."""
        try:
            (self.folder / f"struck-{fault.name}").touch(exist_ok=False)
        except FileExistsError:
            return
        self.actions[fault.action](fault.amount)

    def _signal(self, number: int) -> None:
        os.kill(os.getpid(), number)
        if number == signal.SIGKILL:
            time.sleep(60)

    def _doze(self, seconds: float) -> None:
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        self._signal(signal.SIGSTOP)

    def _reset(self) -> None:
        for link in self.links:
            link.reset_connection()

    def _cut(self, ways: Iterable[str], seconds: float) -> None:
        self.cut_until |= dict.fromkeys(ways, time.monotonic() + seconds)

    def _rate(self, mbps: float) -> None:
        for link in self.links:
            link._session.wire.line.rate = mbps * 1e6 / 8

    def _flip(self, where: str) -> None:
        self.flip = where

    def _flip_file(self) -> None:
        *_, path = sorted((self.run / "checkpoints").glob(f"step-*/stage-{self.stage}.safetensors"))
        flip_file(path, self.random)
        self._signal(signal.SIGKILL)

    def _full(self, count: float) -> None:
        self.unwritten = int(count)

    def _fill(self) -> None:
        with suppress(OSError), (self.run / "filler").open("wb", buffering=0) as file:
            for size in (2**16, 1):
                with suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass

    def _jump(self, seconds: float) -> None:
        (self.folder / CLOCK).write_text(str(seconds))
        shift_clock(seconds)

    def _lie(self, name: str) -> None:
        self.lie = name


LIES = ("nan gradient", "infinite gradient", "nan norm", "infinite norm", "negative norm", "long norm", "first id", "last id")
LIES += ("no object", "no JSON", "another step", "too long", "more fields", "nan activation")
"""What a stage may tell its neighbours by mistake, once: numbers of a payload, of the outcome of a step, ids, and messages as such."""
NUMBERS: dict[str, float | int] = {
    "nan norm": float("nan"), "infinite norm": float("inf"), "negative norm": -1.0, "long norm": 10**400,
}  # fmt: skip
MESSAGES = {"no object": b"[1, 2]", "no JSON": b"{", "too long": b" " * (MESSAGE_BYTES + 1)}


def deadlock(library: ctypes.CDLL) -> None:
    """Wait for a lock that this thread itself has; no signal wakes it up."""
    mutex = ctypes.create_string_buffer(256)
    for _ in range(2):
        library.pthread_mutex_lock(mutex)


def shift_clock(seconds: float) -> None:
    """Let the clocks of the day jump, in this process; those that only count are true."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + seconds
    time.time_ns = lambda: now_ns() + int(seconds * 1e9)


def flip_bit(data: bytes | bytearray | memoryview, generator: random.Random) -> bytes:
    """Return the bytes with one bit turned over."""
    damaged = bytearray(data)
    damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
    return bytes(damaged)


def flip_file(path: Path, generator: random.Random) -> None:
    """Turn one bit of a file over."""
    path.write_bytes(flip_bit(path.read_bytes(), generator))


def arm(faults: list[Fault], scene: Scene) -> None:
    """Put the faults of a stage into the package of this process."""
    from thinwire.checkpoint import writing
    from thinwire.model.stage import Stage
    from thinwire.optim.optimizers import StageOptimizer
    from thinwire.replicas.peers import Peers
    from thinwire.run import restore

    passed = dict.fromkeys((*POINTS, "restore", "exchange"), 0)

    def passing(point: str) -> None:
        passed[point] += 1
        for fault in faults:
            if (fault.replica, fault.stage, fault.point, fault.number) == (scene.replica, scene.stage, point, passed[point]):
                scene.strike(fault)

    def before(owner: Any, name: str, point: str, wanted: Callable[..., bool] = lambda *given: True) -> None:
        original = getattr(owner, name)

        def wrapped(*given: Any, **words: Any) -> Any:
            if wanted(*given):
                passing(point)
            return original(*given, **words)

        setattr(owner, name, wrapped)

    before(Stage, "forward", "forward", lambda stage, ids, payload, context: context.training)
    before(Port, "send", "backward", lambda port, tensor: port.outgoing[0].direction == "backward" and port.counting)
    before(StageOptimizer, "step", "optimizer")
    before(writing, "write_atomic", "write")
    before(restore, "choose", "restore")
    before(Peers, "swap", "exchange")
    write_part = writing.write_part

    def write(*given: Any) -> bool:
        if scene.unwritten:
            scene.unwritten -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_part(*given)

    writing.write_part = write
    arm_links(scene)
    arm_connections(scene)
    arm_messages(scene)
    jumped = scene.folder / CLOCK
    if jumped.exists():
        shift_clock(float(jumped.read_text()))


def arm_links(scene: Scene) -> None:
    """Know the links of the epoch under way."""
    link = Neighbours._link

    def linked(self: Neighbours, *given: Any, **named: Any) -> Link:
        made = link(self, *given, **named)
        scene.links = [old for old in scene.links if old.state not in ("closed", "failed")] + [made]
        return made

    Neighbours._link = linked  # type: ignore[method-assign]


def arm_connections(scene: Scene) -> None:
    """Let connections lose their way, and bits turn over."""
    flush, receive, records, write = Connection.flush, TlsStream._receive, TlsStream._records, Connection.write

    def is_cut(way: str) -> bool:
        if time.monotonic() >= scene.cut_until[way]:
            return False
        time.sleep(POLL_SECONDS)  # the selector finds the socket ready again and again
        return True

    def flushed(self: Connection, now: float) -> bool:
        return False if is_cut("out") else flush(self, now)

    def received(self: TlsStream) -> int:
        if is_cut("in"):
            return 0
        if scene.flip != "cipher":
            return receive(self)
        incoming = self._incoming
        self._incoming = mock.Mock(write=lambda data: incoming.write(flip_bit(data, scene.random)))
        try:
            return receive(self)
        finally:
            self._incoming, scene.flip = incoming, None

    def read(self: TlsStream) -> list[bytes]:
        found = records(self)
        if found and scene.flip == "read":
            scene.flip = None
            found[0] = flip_bit(found[0], scene.random)
        return found

    def written(self: Connection, pieces: Iterable[bytes | memoryview], now: float, frames: int = 0) -> None:
        if scene.flip == "sent":
            scene.flip = None
            pieces = [flip_bit(b"".join(pieces), scene.random)]
        write(self, pieces, now, frames)

    Connection.flush, Connection.write = flushed, written  # type: ignore
    TlsStream._receive, TlsStream._records = received, read  # type: ignore


def arm_messages(scene: Scene) -> None:
    """Let a worker say what is not so."""
    send, send_message = Port.send, Control.send

    def sent(self: Port, tensor: torch.Tensor) -> None:
        slot = self.outgoing[self.sent % len(self.outgoing)]
        number = {"nan gradient": "nan", "infinite gradient": "inf", "nan activation": "nan"}.get(scene.lie or "")
        if number is not None and slot.index is not None and (slot.direction == "backward") == (scene.lie != "nan activation"):
            scene.lie, tensor = None, torch.full_like(tensor, float(number))
        elif scene.lie in ("first id", "last id") and slot.index is None and self.counting:
            tensor = tensor.clone()
            tensor[0, 0 if scene.lie == "first id" else -1] = 2**16 - 1
            scene.lie = None
        send(self, tensor)

    def told(self: Control, link: Link, message: dict[str, Any]) -> None:
        lie = scene.lie
        if "squared_norm" not in message or lie not in (*NUMBERS, *MESSAGES, "another step", "more fields"):
            send_message(self, link, message)
            return
        scene.lie = None
        if lie in MESSAGES:
            frame = Frame.make(Kind.STEP, MESSAGES[lie], epoch=link.epoch)
            with mock.patch.object(link._outbox._cursor, "check"):  # a worker of ours would not send it
                link.send(frame)
            return
        wrong = {"squared_norm": NUMBERS[lie]} if lie in NUMBERS else {"step": message["step"] + 1} if lie == "another step" else {"x": 1}
        send_message(self, link, message | wrong)

    Port.send, Control.send = sent, told  # type: ignore[method-assign]


def obey(scene: Scene) -> None:
    """Do what files in the folder say, at any moment of this worker's life: `order-STAGE-NUMBER` holds `ACTION AMOUNT`."""
    while True:
        for path in scene.folder.glob(f"order-{scene.stage}-*"):
            with suppress(FileNotFoundError):
                action, _, amount = path.read_text().rpartition(" ")
                path.unlink()
                scene.actions[action](float(amount))
        time.sleep(POLL_SECONDS)


def order(folder: Path, stage: int, number: int, action: str, amount: float = 0.0) -> None:
    """Give a worker such an order."""
    written = folder / f"new-{stage}-{number}"
    written.write_text(f"{action} {amount}")
    written.rename(folder / f"order-{stage}-{number}")


def train(member: Membership, say: Say, stop: Stop, faults: list[dict[str, Any]], struck: str, **arguments: Any) -> dict[str, Any]:
    """Train as `launch.train_worker` does, with faults; say first which process this is."""
    say({"pid": os.getpid()})

    def timed(message: dict[str, Any]) -> None:
        say(message | {"at": time.monotonic()})  # one clock for all processes of a machine

    scene = Scene(member.stage, Path(struck), Path(arguments["run"]), replica=member.replica)
    arm([Fault(**fault) for fault in faults], scene)
    threading.Thread(target=obey, args=(scene,), daemon=True).start()
    return launch.train_worker(member, timed, stop, **arguments)


def given(faults: list[Fault], struck: Path) -> dict[str, Any]:
    """Return the arguments that `train` takes besides those of training."""
    struck.mkdir(parents=True, exist_ok=True)
    return {"faults": [asdict(fault) for fault in faults], "struck": str(struck)}


def train_with(
    words: list[str],
    faults: list[Fault],
    struck: Path,
    heard: list[tuple[int, dict]] | None = None,
    hear: Hear | None = None,
    steps: list[tuple[WorkerId, dict]] | None = None,
) -> dict[str, Any]:
    """Run `thinwire train` in workers that meet these faults; return its summary.

    `heard` gets what stages say besides their steps, `steps` their steps, `hear` is told everything.
    """
    command: TrainCommand = parse_train([*words, "--pipeline.mode", "workers"])
    arguments = {"run": str(command.run), "resume": command.resume, **given(faults, struck)}

    def listen(worker_id: WorkerId, message: dict[str, Any]) -> None:
        if heard is not None and "step" not in message:
            heard.append((worker_id.stage, message | {"at": time.monotonic()}))
        if steps is not None and "step" in message:
            steps.append((worker_id, message))
        if hear is not None:
            hear(worker_id.stage, message)

    return run_workers(train, command.config, arguments, listen, replacing={"replacing": True})[0]


def command_with(words: list[str], faults: list[Fault], struck: Path, told: Hear | None = None) -> int:
    """Type a `thinwire train` whose workers meet these faults; return its exit code. `told` is told all that the supervisor hears."""

    def supervisor(task: Any, config: Any, arguments: dict[str, Any], hear: Hear, **options: Any) -> list[dict[str, Any]]:
        def both(worker_id: WorkerId, message: dict[str, Any]) -> None:
            hear(worker_id, message)
            if told is not None:
                told(worker_id, message)

        return run_workers(train, config, arguments | given(faults, struck), both, **options)

    with mock.patch.object(launch, "run_workers", supervisor):
        return cli.main(["train", *words, "--pipeline.mode", "workers"])
