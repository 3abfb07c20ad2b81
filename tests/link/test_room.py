"""Who has to go when too many connections wait, and how much the log says about it. No socket, no clock."""

from __future__ import annotations

import logging
import socket

import pytest

from thinwire.link.tcp.refusals import MOST_ADDRESSES, MOST_LINES, Refusals
from thinwire.link.tcp.room import MOST_QUIET, MOST_TALKING, Guest, Room, neighbourhood

NOBODY = socket.socket(socket.AF_UNIX)


def guest(host: str = "10.0.0.1", **more) -> Guest:
    return Guest(NOBODY, host, f"{host}:1", deadline=0.0, **more)


def fill(room: Room, number: int, host: str, *, talking: bool) -> list[Guest | None]:
    """Let a stranger in; return who had to go."""
    stranger = guest(host.format(number // 250, number % 250))
    gone = [room.enter(stranger)]
    for each in gone:
        if each is not None:
            room.leave(each)
    if talking and stranger in room:
        room.spoke(stranger)
        if (crowded_out := room.excess()) is not None:
            gone.append(crowded_out)
            room.leave(crowded_out)
    return gone


@pytest.mark.parametrize("host", ["10.0.0.1", "10.1.{}.{}"])
@pytest.mark.parametrize("talking", [False, True])
def test_no_number_of_strangers_pushes_a_member_out_of_its_handshake(host, talking):
    room, peer = Room(), guest("10.0.0.1")
    room.enter(peer)
    room.spoke(peer)
    peer.member = True
    for number in range(5_000):
        assert peer not in fill(room, number, host, talking=talking)
    assert peer in room and len(room) <= MOST_QUIET + MOST_TALKING


@pytest.mark.parametrize("host", ["10.0.0.1", "10.1.{}.{}"])
def test_whoever_is_new_has_time_for_its_first_bytes(host):
    room, peer = Room(), guest("10.0.0.1")
    room.enter(peer)
    for number in range(MOST_QUIET - 1):
        assert peer not in fill(room, number, host, talking=False)


def test_the_address_that_holds_the_most_gives_way_first():
    room, lone = Room(quiet=3), guest("10.0.0.9")
    room.enter(lone)
    crowd = [guest("10.0.0.1") for _ in range(4)]
    shown_out = []
    for stranger in crowd:
        if (gone := room.enter(stranger)) is not None:
            room.leave(gone)
            shown_out.append(gone)
    assert shown_out == crowd[:2] and lone in room


def test_the_refused_go_first_then_strangers_then_members():
    room = Room(talking=2)
    member, stranger, other = guest(member=True), guest(), guest()
    for each in (member, stranger):
        room.enter(each)
        room.spoke(each)
        assert room.excess() is None
    room.enter(other)
    room.spoke(other)
    assert room.excess() is stranger
    other.refused = True
    room.leave(stranger)
    assert room.least() is other


def test_a_member_that_comes_last_is_weighed_by_what_it_has_shown():
    """A room full of those who repeat a member's word does not cost the true one its place: its address holds the fewest."""
    room, peer = Room(talking=3), guest("10.0.0.9")
    for _ in range(3):
        room.enter(each := guest("10.0.0.1", member=True))
        room.spoke(each)
    room.enter(peer)
    room.spoke(peer)
    peer.member = True
    assert room.excess() not in (None, peer)


def test_one_household_is_one_address():
    assert neighbourhood("2001:db8::1") == neighbourhood("2001:db8::ffff:2") != neighbourhood("2001:db8:0:1::1")
    assert neighbourhood("::ffff:10.0.0.1") == neighbourhood("10.0.0.1")
    assert neighbourhood("fe80::1%eth0") == neighbourhood("fe80::2")


def test_an_address_is_logged_once_a_second_and_says_what_was_left_out(caplog):
    now = [0.0]
    refusals = Refusals(lambda: now[0])
    with caplog.at_level(logging.INFO, "thinwire.link"):
        for number in range(1000):
            now[0] = number / 250
            refusals.note("10.0.0.1", f"10.0.0.1:{number}", "no TLS")
    assert [record.getMessage() for record in caplog.records][:2] == [
        "refused a connection from 10.0.0.1:0: no TLS",
        "refused a connection from 10.0.0.1:250: no TLS (and 249 others from 10.0.0.1 before)",
    ]
    assert len(caplog.records) == 4 and len(refusals.latest) == 100


def test_many_addresses_fill_neither_the_log_nor_the_memory(caplog):
    now = [0.0]
    refusals = Refusals(lambda: now[0])
    with caplog.at_level(logging.INFO, "thinwire.link"):
        for number in range(20_000):
            now[0] = number / 10_000
            refusals.note(f"10.0.{number // 250}.{number % 250}", f"stranger {number}", "no TLS")
    assert MOST_LINES <= len(caplog.records) <= 3 * MOST_LINES
    assert max(len(refusals._told), len(refusals._untold)) <= MOST_ADDRESSES
