"""Frames and their parser."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace

import pytest

from thinwire.link.errors import ProtocolError
from thinwire.link.frame import BODY, CRC, HEADER_BYTES, MAGIC, VERSION, Channel, Dtype, Frame, Header, Kind, Parser, decode_header, encode


def accept_all(header: Header) -> None:
    pass


def example(size: int = 300) -> Frame:
    fields = {"epoch": 3, "step": 70_000, "microbatch": 5, "tensor": 2, "basis_version": 9, "sequence": 2**40, "dtype": int(Dtype.BF16)}
    return Frame.make(Kind.DATA, random.Random(size).randbytes(size), dims=(2, 3, 50), **fields)


def test_header_survives_the_wire():
    frame = example()
    header = decode_header(encode(frame))
    assert replace(header, crc32=0) == frame.header
    assert HEADER_BYTES == 76


def test_parser_gives_the_same_frames_however_the_stream_is_cut():
    frames = [example(size) for size in (0, 1, 75, 76, 77, 300, 5000)]
    stream = b"".join(map(encode, frames))
    for step in (1, 2, 75, 76, 77, 1000, len(stream)):
        parser = Parser(accept_all)
        found = [frame for at in range(0, len(stream), step) for frame in parser.feed(stream[at : at + step])]
        assert [bytes(frame.payload) for frame in found] == [frame.payload for frame in frames], step
        assert parser.held_bytes == 0


def header_bytes(position: int, value: int) -> bytes:
    damaged = bytearray(encode(example(0)))
    damaged[position] = value
    return bytes(damaged)


@pytest.mark.parametrize(
    "data, field",
    [
        (header_bytes(0, 0), "magic"),
        (header_bytes(4, VERSION + 1), "version"),
        (header_bytes(5, 0), "kind"),
        (header_bytes(5, 99), "kind"),
        (header_bytes(6, 7), "channel"),
        (header_bytes(6, int(Channel.BULK)), "channel"),
        (header_bytes(8, 5), "dims"),
        (header_bytes(8, 2), "dims"),
        (header_bytes(52, 1), "length"),
    ],
)
def test_a_wrong_header_is_refused_by_name(data, field):
    with pytest.raises(ProtocolError) as caught:
        list(Parser(accept_all).feed(data))
    assert caught.value.field == field
    assert field in str(caught.value)


def test_damaged_payload_and_damaged_header_fail_the_crc():
    for position in (BODY.size - 30, HEADER_BYTES + 7):
        damaged = bytearray(encode(example(100)))
        damaged[position] ^= 1
        with pytest.raises(ProtocolError, match="crc32"):
            list(Parser(accept_all).feed(bytes(damaged)))


def test_refusal_comes_before_memory_is_taken():
    def refuse(header: Header) -> None:
        raise ProtocolError("length", header.total, 10)

    huge = Header(Kind.DATA, Channel.BOUNDARY, length=2**31, total=2**40)
    body = BODY.pack(MAGIC, VERSION, huge.kind, huge.channel, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, huge.length, 0, huge.total)
    parser = Parser(refuse)
    with pytest.raises(ProtocolError, match="length is 1099511627776"):
        list(parser.feed(body + CRC.pack(zlib.crc32(body)) + b"start"))
    assert parser.held_bytes == 0


def test_fuzzed_streams_only_ever_give_a_protocol_error():
    generator = random.Random(7)
    seeds = [encode(example(size)) for size in (0, 10, 200)]
    refused = 0
    for _ in range(4000):
        data = bytearray(generator.choice(seeds) + generator.choice(seeds))
        for _ in range(generator.randrange(0, 4)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        parser = Parser(limit_length)
        cut = generator.randrange(len(data))
        try:
            for piece in (data[:cut], data[cut:]):
                list(parser.feed(bytes(piece)))
        except ProtocolError:
            refused += 1
        assert parser.held_bytes <= 1000 + HEADER_BYTES
    assert 1000 < refused < 4000


def limit_length(header: Header) -> None:
    if header.length > 1000:
        raise ProtocolError("length", header.length, 1000)
