"""What `fuzz.py` feeds: for every reader good inputs, the errors it may raise, and a call that goes as far as the real one does."""

from __future__ import annotations

import json
import shutil
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from fuzz_payloads import payloads, read_payload
from thinwire import checkpoint
from thinwire.checkpoint.manifest import encode_manifest, read_manifest
from thinwire.checkpoint.reading import all_manifests, position_of
from thinwire.cluster import places
from thinwire.cluster.backups import MOST_COPIES, PIECE, Copies
from thinwire.cluster.places import PLACES_FILE, Places
from thinwire.cluster.standby import hear, worker_id_in
from thinwire.config.toml import from_toml, load_config, packaged, to_toml
from thinwire.link.contract import Contract, Cursor, Flow, TensorForm
from thinwire.link.errors import Abort, LinkClosed, LinkError, ProtocolError
from thinwire.link.frame import Channel, Frame, Kind, Parser
from thinwire.link.frame import encode as encode_frame
from thinwire.link.hello import PeerBehind, PeerReplaced, Terms, decode_hello, judge, make_hello
from thinwire.link.identity import make_identity
from thinwire.link.inbox import Inbox
from thinwire.link.link import Link
from thinwire.link.meter import LinkMeter
from thinwire.link.options import LinkOptions
from thinwire.link.outbox import Outbox
from thinwire.link.peer import STANDBYS, Worker, WorkerId
from thinwire.link.roster import Roster, parse_roster, read_roster, roster_text
from thinwire.link.tcp.contexts import trust
from thinwire.model.cut import StagePlan
from thinwire.pipeline import forms
from thinwire.pipeline.alone import GroupAlone
from thinwire.pipeline.control import Control
from thinwire.pipeline.links import Links
from thinwire.pipeline.outcome import Outcome
from thinwire.run.check import check
from thinwire.run.restore import held_for_each

LEFT, RIGHT = WorkerId(0, 0), WorkerId(0, 1)
OPTIONS = LinkOptions(credit_frames=8)
TERMS = Terms("train-0123456789abcdef", {"model.width": 64, "codec.name": "dense", "train.rate": 3e-3, "data.source": "a b"}, RIGHT, 17)
CONSUMED = ((0, 0),) * len(Channel)
LARGEST = 4096


@dataclass(frozen=True)
class Target:
    """One reader."""

    seeds: Callable[[Path], list[bytes]]
    """Make good inputs, and in a folder whatever the reader needs."""
    run: Callable[[bytes, Path], None]
    kinds: tuple[type[Exception], ...]
    """The errors that it declares."""
    text: bool = True
    """Whether inputs are JSON or TOML."""
    foreign: bool = True
    """Whether somebody else may have written it, so that what is said of it must be safe to show."""
    refused: frozenset[int] = frozenset()
    """Numbers of the good inputs that are refused all the same: a later epoch, a vote for nothing, a part without its neighbour."""


class Said:
    """A link whose other end says one thing."""

    def __init__(self, data: bytes, kind: Kind = Kind.STEP) -> None:
        self.frame, self.epoch, self.peer, self.aborted = Frame.make(kind, bytearray(data)), 0, RIGHT, ""

    def receive(self, channel: Channel, timeout: float | None = None) -> Frame:
        return self.frame

    def send(self, frame: Frame, timeout: float | None = None) -> None:
        pass

    def abort(self, reason: str, code: Abort = Abort.LOST) -> None:
        self.aborted = reason


def control(data: bytes) -> Control:
    """Talk with a right neighbour that says one thing."""
    return Control(None, cast(Link, Said(data)))


def greetings(folder: Path) -> list[bytes]:
    return [make_hello(TERMS, epoch, OPTIONS, epoch, CONSUMED, met).encode() for epoch, met in ((0, 0), (1, 5))]


def greet(data: bytes, folder: Path) -> None:
    theirs = decode_hello(data)
    mine = make_hello(Terms(TERMS.run, TERMS.config, LEFT, 9), 0, OPTIONS, 0, CONSUMED)
    with suppress(PeerBehind, PeerReplaced):
        judge(mine, theirs, RIGHT, 17, heard=bool(theirs.received % 2))
        Outbox(Cursor(Flow(), Contract()), OPTIONS, LinkMeter()).rewind(theirs.received, theirs.consumed)


def ballots(folder: Path) -> list[bytes]:
    vote: dict[str, Any] = {"steps": ["step-000004", "step-000008-1-0123abcd"], "copies": {"0": ["step-000004"]}}
    vote |= {"recovering": True, "confirmed": 4}
    return [json.dumps({"workers": [[0, each]]}).encode() for each in (vote, vote | {"steps": [], "copies": {}})]


def vote(data: bytes, folder: Path) -> None:
    mine = {"steps": ["step-000004"], "copies": {"1": ["step-000008"]}, "recovering": False, "confirmed": -1}
    votes = control(data).gather(mine, forms.VOTE)
    lists = [{*each["steps"], *held} for each, held in zip(votes, held_for_each(votes, 2), strict=True)]
    checkpoint.common(folder, lists, 2)
    max(each["confirmed"] for each in votes)


def outcomes(folder: Path) -> list[bytes]:
    full = Outcome(3, 1.5, 2.0, True, 0.1, 0.2, saved=(1, 2), copied=(1,))
    return [json.dumps(asdict(each)).encode() for each in (full, Outcome(3, None, 0.0))]


def settle(data: bytes, folder: Path) -> None:
    total = control(data).settle(Outcome(3, None, 1.0, saved=(1, 2), copied=(2,)))
    assert total.norm is not None and total.step == 3


def facts(folder: Path) -> list[bytes]:
    sampling = {"temperature": 1.0, "top_k": None, "top_p": 0.9, "seed": 0}
    part = {"hashes": {"a": "b"}, "parameters": 7, "boundary": dict.fromkeys(("tokens", "forward", "backward", "ids"), 5), "links": []}
    part |= {"exchange": 0, "memory": {"peak": 3}}
    said = [
        {"data": "0123", "validation_rows": 8, "resume": False, "summarised": -1},
        {"rows": 8, "bytes_per_token": 3.2},
        {"length": 3, "limit": 5, "end": None, "sampling": sampling},
        part,
        {"step": 3, "outcome": asdict(Outcome(3, None, 0.0))},
        {"fingerprint": "ab"},
    ]
    return [json.dumps(each).encode() for each in said]


def announce(data: bytes, folder: Path) -> None:
    kinds = {b"validation_rows": forms.ABOUT_DATA, b"bytes_per_token": forms.ABOUT_ROWS, b"sampling": forms.ORDER}
    kinds |= {b"hashes": forms.PART, b"outcome": forms.LAST}
    form = next((form for word, form in kinds.items() if word in data), forms.FINGERPRINT)
    Control(cast(Link, Said(data)), None).announce(None, form)


PLANS = [StagePlan(index=index, count=2, layers=range(2 * index, 2 * index + 2)) for index in range(2)]


def manifests(folder: Path) -> list[bytes]:
    place = folder / "checkpoints/step-000004"
    place.mkdir(parents=True)
    (place / "stage-0.safetensors").write_bytes(b"tensors")
    digest = checkpoint.file_sha256(place / "stage-0.safetensors")
    common = {"sha256": digest, "bytes": 7, "step": 4, "seconds": 1.5, "before": "4x8@2", "basis_version": 0, "stage": 0}
    common |= {"config": "c", "settings": "c", "data": "d", "split": "2,2", "microbatches": 2}
    return [
        encode_manifest({"format": 2, **common, "stages": 2, "layers": [0, 1]}),
        encode_manifest({"format": 2, **common, "stages": 1, "layers": [0, 1, 2, 3], "everyone": 4}),
        json.dumps({"format": 1, **common, "stages": 1, "layers": [0, 1]}).encode(),
    ]


def read_manifests(data: bytes, folder: Path) -> None:
    with suppress(ValueError, RecursionError):  # what was changed is signed again: a checksum must not hide the code behind it
        content = json.loads(data)
        if isinstance(content, dict) and "checksum" in content:
            data = encode_manifest(content)
    place = folder / "checkpoints/step-000004"
    (place / "stage-0.json").write_bytes(data)
    checkpoint.survey(folder).available(PLANS[:1], verify=True)
    checkpoint.complete(folder)
    known = {"data": "d", "split": "4", "microbatches": 2}
    read_manifest(place, 0, known)
    position_of(all_manifests(place, known), known)


def rosters(folder: Path) -> list[bytes]:
    made = [make_identity(folder / str(number), "x").certificate for number in range(3)]
    workers = [Worker(LEFT, made[0], "203.0.113.5:29400", "attic"), Worker(RIGHT, made[1])]
    (folder / "roster.toml").write_text(roster_text(Roster.of(workers, [Worker(WorkerId(STANDBYS, 0), made[2], "[::1]:29400", "cellar")])))
    return [(folder / "roster.toml").read_bytes(), roster_text(Roster.of(workers[:1])).encode()]


def read_rosters(data: bytes, folder: Path) -> None:
    roster = parse_roster(data.decode(), "the roster")
    assert parse_roster(roster_text(roster), "what was written") == roster
    for worker in (*roster.workers.values(), *roster.standbys):
        trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), worker.certificate)
    for worker_id in (*roster.workers, *(each.id for each in roster.standbys)):
        assert roster.called(worker_id).isprintable() and len(roster.called(worker_id)) < 100


@cache
def good_roster(folder: Path) -> Roster:
    return read_roster(folder / "roster.toml")


def assignments(folder: Path) -> list[bytes]:
    rosters(folder)
    roster = good_roster(folder)
    Places(roster, folder).take(RIGHT, roster.standbys[0])
    return [(folder / PLACES_FILE).read_bytes()]


def read_places(data: bytes, folder: Path) -> None:
    (folder / PLACES_FILE).write_bytes(data)
    places.read_places(good_roster(folder), folder)


def questions(folder: Path) -> list[bytes]:
    return [json.dumps({"word": word, "place": worker_id}).encode() for word, worker_id in (("take", [0, 1]), ("which", None))]


def ask(data: bytes, folder: Path) -> None:
    worker_id_in(hear(cast(Link, Said(data))))


SIZE = struct.Struct("<H")


def copies(folder: Path) -> list[bytes]:
    """Several messages in one input, each behind its size."""
    found = []
    for stage, step in ((1, 4), (0, 5), (1, 6)):
        name, tensors = f"step-{step:06d}".encode(), bytes(range(100))
        (folder / "x").write_bytes(tensors)
        manifest = json.dumps({"sha256": checkpoint.file_sha256(folder / "x")}).encode()
        pieces = [PIECE.pack(stage, 0, len(name), offset, 100) + name + tensors[offset : offset + 60] for offset in (0, 60)]
        pieces.append(PIECE.pack(stage, 1, len(name), 0, len(manifest)) + name + manifest)
        found.append(b"".join(SIZE.pack(len(piece)) + piece for piece in pieces))
    return [*found, found[0] + found[1]]


class Sent:
    """A link over which pieces of copies come, and then nothing more."""

    peer = RIGHT

    def __init__(self, data: bytes) -> None:
        self.pieces, start = [], 0
        while start + SIZE.size <= len(data):
            (size,) = SIZE.unpack_from(data, start)
            self.pieces.append(data[start + SIZE.size : start + SIZE.size + size])
            start += SIZE.size + size
        self.pieces.reverse()
        self.refusal: str | None = None

    def receive(self, channel: Channel) -> Frame:
        if not self.pieces or self.refusal is not None:
            raise LinkClosed("no more")
        return Frame.make(Kind.SNAPSHOT, self.pieces.pop(), channel=channel)

    def abort(self, reason: str, code: Abort = Abort.LOST) -> None:
        self.refusal = reason


def take_copies(data: bytes, folder: Path) -> None:
    """Take pieces as the thread of a link does; what stays is bounded, however many inputs have come before."""
    run, sent = folder / "run", Sent(data)
    keeper = Copies(run, 0, 2, Links(None, None, {}), LARGEST, GroupAlone())
    keeper.whole[1] = set()
    keeper.expect("step-000005")
    keeper._take(1, cast(Link, sent))
    keeper.held()
    whole, begun = ([*(run / "copies").glob(f"step-*/stage-1.json{ending}")] for ending in ("", ".copy"))
    assert len(whole) <= MOST_COPIES and len(begun) <= 1, (whole, begun)
    sizes = [path.stat().st_size for path in (run / "copies").glob("step-*/stage-1.safetensors*")]
    assert len(sizes) <= MOST_COPIES + 1 and all(size <= LARGEST for size in sizes), sizes
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    if sent.refusal is not None:
        raise ProtocolError("SNAPSHOT", sent.refusal, "pieces of a copy")


def configs(folder: Path) -> list[bytes]:
    return [to_toml(load_config(name)).encode() for name in packaged()]


def read_configs(data: bytes, folder: Path) -> None:
    config = from_toml(data.decode(), "a config")
    check(config)
    assert from_toml(to_toml(config)) == config


CONTRACT = Contract(incoming=Flow.constant((TensorForm(0, (), 40_000, exact=False),), 2))


def frames(folder: Path) -> list[bytes]:
    parts = [Frame.make(Kind.DATA, bytes(500), sequence=1), Frame.make(Kind.STEP, b"12345678", sequence=2)]
    return [b"".join(map(encode_frame, parts[:count])) for count in (1, 2)]


def parse_frames(data: bytes, folder: Path) -> None:
    inbox = Inbox(Cursor(CONTRACT.incoming, CONTRACT), OPTIONS, LinkMeter())
    for frame in Parser(inbox.check).feed(data):
        inbox.accept(frame, 0.0)


TARGETS: dict[str, Target] = {
    "hello": Target(greetings, greet, (LinkError,), refused=frozenset({1})),
    "votes": Target(ballots, vote, (ProtocolError, ValueError), refused=frozenset({1})),
    "outcomes": Target(outcomes, settle, (ProtocolError, ValueError)),
    "facts": Target(facts, announce, (ProtocolError,)),
    "manifests": Target(manifests, read_manifests, (ValueError,), refused=frozenset({0})),
    "rosters": Target(rosters, read_rosters, (ValueError,)),
    "copies": Target(copies, take_copies, (ProtocolError,), text=False),
    "configs": Target(configs, read_configs, (ValueError,), foreign=False),
    "places": Target(assignments, read_places, (ValueError,)),
    "questions": Target(questions, ask, (ProtocolError,)),
    "frames": Target(frames, parse_frames, (ProtocolError,), text=False),
    "payloads": Target(payloads, read_payload, (ValueError,), text=False),
}
