"""HELLO: what two ends tell each other before anything else, and the comparison that names what differs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from thinwire.link.errors import Interrupted, LinkError, Replaced, Stopping
from thinwire.link.frame import EPOCHS, VERSION, Channel
from thinwire.link.message import ANY, FLAG, TEXT, decode_message, fields, printable, rule, table_of, whole
from thinwire.link.options import LinkOptions
from thinwire.link.peer import WorkerId
from thinwire.util.shown import shown

MAX_NAMED = 5
"""Differences named in one message."""

COUNT = whole(0, 2**64 - 1)
PAIR = rule("two numbers", lambda value: is_pair(value))
FORM = fields(
    {
        "protocol": COUNT,
        "run": TEXT,
        "config_hash": TEXT,
        "config": table_of(ANY, 2**12),
        "replica": COUNT,
        "stage": COUNT,
        "epoch": whole(0, EPOCHS - 1),
        "ending": FLAG,
        "incarnation": COUNT,
        "credit": PAIR,
        "met": COUNT,
        "received": COUNT,
        "consumed": rule(
            f"{len(Channel)} pairs of numbers",
            lambda value: isinstance(value, list) and len(value) == len(Channel) and all(map(is_pair, value)),
        ),
    }
)


def is_pair(value: object) -> bool:
    """Tell whether a value is two counts."""
    return isinstance(value, list) and len(value) == 2 and all(type(each) is int and 0 <= each < 2**64 for each in value)


class PeerBehind(Exception):
    """The peer is in an earlier epoch: wait for it."""


class PeerReplaced(Exception):
    """The peer is an older process of its worker than one that was met before: tell it, and wait for the newer one."""


@dataclass(frozen=True)
class Terms:
    """What one worker says about itself and the run."""

    run: str
    config: Mapping[str, Any]
    """The shared part of the config, flat: `model.width` -> 256. Device, paths, budgets and rates stay out."""
    worker_id: WorkerId
    incarnation: int = 0
    """Differs each time the worker's process starts."""
    ending: bool = False
    """Whether the worker trains no more, and only agrees with the others on the last step."""


@dataclass(frozen=True)
class Hello:
    """The content of one HELLO frame."""

    protocol: int
    run: str
    config_hash: str
    config: dict[str, Any]
    replica: int
    stage: int
    epoch: int
    ending: bool
    incarnation: int
    credit: tuple[int, int]
    met: int
    """The newest incarnation of the other end that this one ever met; 0: none."""
    received: int
    """Sequence number of the last part received."""
    consumed: tuple[tuple[int, int], ...]
    """Per channel: frames and bytes the worker has taken from the link."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def make_hello(terms: Terms, epoch: int, options: LinkOptions, received: int, consumed: tuple[tuple[int, int], ...], met: int = 0) -> Hello:
    """Describe this end."""
    config = json.loads(json.dumps(dict(terms.config)))
    return Hello(
        protocol=VERSION,
        run=terms.run,
        config_hash=config_hash(config),
        config=printable(config, "HELLO"),  # as the other end will read it
        replica=terms.worker_id.replica,
        stage=terms.worker_id.stage,
        epoch=epoch,
        ending=terms.ending,
        incarnation=terms.incarnation,
        credit=(options.credit_frames, options.credit_bytes),
        met=met,
        received=received,
        consumed=consumed,
    )


def config_hash(config: Mapping[str, Any]) -> str:
    """Hash a flat config, whatever the order of its fields."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def decode_hello(data: bytes | bytearray | memoryview) -> Hello:
    """Read a HELLO; refuse by name what is not one."""
    content = decode_message(data, "HELLO")
    FORM.check(content, "HELLO")
    content["credit"] = tuple(content["credit"])
    content["consumed"] = tuple(tuple(pair) for pair in content["consumed"])
    return Hello(**content)


def differences(mine: Hello, theirs: Hello, peer: WorkerId) -> list[str]:
    """Name everything in which the peer's HELLO does not fit ours; the epoch is not among it."""
    found = []
    if theirs.protocol != mine.protocol:
        found.append(f"protocol version: {mine.protocol} here, {theirs.protocol} there (install the same release)")
    if theirs.run != mine.run:
        found.append(f"run: {mine.run!r} here, {shown(theirs.run, 100)!r} there")
    if (theirs.replica, theirs.stage) != (peer.replica, peer.stage):
        found.append(f"place: expected {peer}, the peer says {WorkerId(theirs.replica, theirs.stage)}")
    absent = object()
    for name in sorted({*mine.config, *theirs.config}):
        here, there = mine.config.get(name, absent), theirs.config.get(name, absent)
        if here != there or type(here) is not type(there):
            words = ["nothing" if value is absent else shown(repr(value), 100) for value in (here, there)]
            found.append(f"config {shown(name, 100)}: {words[0]} here, {words[1]} there")
    if not found and theirs.config_hash != mine.config_hash:
        found.append(f"config hash: {mine.config_hash[:12]} here, {theirs.config_hash[:12]} there, though no field differs")
    if theirs.credit != mine.credit:
        found.append(f"link.credit_frames and link.credit_bytes: {mine.credit} here, {theirs.credit} there")
    return found if len(found) <= MAX_NAMED else [*found[:MAX_NAMED], f"and {len(found) - MAX_NAMED} more"]


def judge(mine: Hello, theirs: Hello, peer: WorkerId, incarnation: int | None, *, heard: bool = True) -> None:
    """Raise why the two ends cannot work together; `incarnation` is the peer's newest so far, `heard` whether this link has met it."""
    found = differences(mine, theirs, peer)
    if found:
        raise LinkError(f"{WorkerId(mine.replica, mine.stage)} and {peer} do not fit together: {'; '.join(found)}")
    if incarnation is not None and theirs.incarnation < incarnation:
        raise PeerReplaced(
            f"a newer process has taken the place of this one at {peer}; end this one, or, if it is the newer, set the clock"
        )
    if theirs.met > mine.incarnation:
        raise Replaced(f"a newer process has taken the place of this one, says {peer}; end this one, or, if it is the newer, set the clock")
    if theirs.ending and not mine.ending:
        raise Stopping(f"{peer} was asked to end")
    if mine.ending and not theirs.ending:
        raise PeerBehind("the peer does not know yet that the run ends")
    if theirs.epoch < mine.epoch:
        raise PeerBehind(f"the peer is still in epoch {theirs.epoch}, this end in {mine.epoch}")
    if theirs.epoch > mine.epoch:
        raise Interrupted(f"{peer} has moved on to epoch {theirs.epoch}, this end is in {mine.epoch}", theirs.epoch)
    if heard and incarnation != theirs.incarnation:
        raise Interrupted(f"{peer} was restarted and has lost the state of this link")
    if not heard and theirs.received:
        raise Interrupted(f"{peer} has the state of a link with the process before this one")
