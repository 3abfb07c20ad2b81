"""Identities, and the refusal of everyone else."""

from __future__ import annotations

import datetime
import socket
import ssl
import stat

import pytest

from link.support import LEFT, LOOPBACK, QUICK, RIGHT, terms
from patience import HANG, wait_until
from thinwire.link.contract import Contract
from thinwire.link.endpoint import Endpoint
from thinwire.link.errors import LinkError
from thinwire.link.identity import certificate_of, fingerprint, load_identity, make_identity
from thinwire.link.link import Link
from thinwire.link.listener import Listener
from thinwire.link.options import LinkOptions
from thinwire.link.peer import Worker
from thinwire.link.tcp import contexts
from thinwire.link.tcp.contexts import client_context, server_context

PAST = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)


def test_an_identity_is_private_and_readable_again(tmp_path):
    identity = make_identity(tmp_path / "me", "stage 0")
    assert stat.S_IMODE(identity.key_path.stat().st_mode) == 0o600
    assert load_identity(tmp_path / "me") == identity
    assert sorted(path.name for path in (tmp_path / "me").iterdir()) == ["certificate.pem", "key.pem"]
    assert len(identity.fingerprint.split(":")) == 32
    assert fingerprint(identity.certificate) == identity.fingerprint
    with pytest.raises(ValueError, match="already holds"):
        make_identity(tmp_path / "me", "again")
    with pytest.raises(ValueError, match="thinwire keys"):
        load_identity(tmp_path / "none")
    with pytest.raises(ValueError, match="PEM"):
        certificate_of("hello")


def test_a_certificate_of_a_version_that_does_not_exist_is_none(tmp_path):
    der = ssl.PEM_cert_to_DER_cert(make_identity(tmp_path / "me", "me").certificate)
    other = der.replace(bytes.fromhex("a003020102"), bytes.fromhex("a00302017a"), 1)
    assert other != der
    with pytest.raises(ValueError, match="not exactly one certificate"):
        certificate_of(ssl.DER_cert_to_PEM_cert(other))


def test_a_certificate_that_tls_cannot_use_is_refused_by_its_fingerprint(tmp_path, monkeypatch):
    """The library that reads certificates and the one that uses them may differ."""
    me, other = make_identity(tmp_path / "me", "me"), make_identity(tmp_path / "other", "other")
    monkeypatch.setattr(contexts, "certificate_of", lambda pem: b"x")
    with pytest.raises(ValueError, match="TLS cannot use the certificate"):
        server_context(me, [other.certificate])


def test_identities_satisfy_a_strict_verifier(tmp_path):
    """Newer Pythons verify strictly by default."""
    left, right = make_identity(tmp_path / "l", "left"), make_identity(tmp_path / "r", "right")
    client, server = client_context(left, right.certificate), server_context(right, [left.certificate])
    for context in (client, server):
        context.verify_flags |= ssl.VERIFY_X509_STRICT
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(incoming, outgoing), server.wrap_bio(outgoing, incoming, server_side=True)]
    done: set[int] = set()
    for _ in range(6):
        for number, end in enumerate(ends):
            try:
                end.do_handshake()
                done.add(number)
            except ssl.SSLWantReadError:
                pass
    assert done == {0, 1} and ends[0].version() == "TLSv1.3"


def attempt(world, *, dialler="right", expected="right", server="left", trusted="left"):
    """Dial a listener with the named identities; return (error of the dialling link, the listener's refusals)."""
    options = LinkOptions(close_seconds=3.0, abort_seconds=1.0, reconnect_seconds=1.0)
    listener = Listener(LOOPBACK, Endpoint(world.identity(server)), [Worker(RIGHT, world.identity(expected).certificate)], options)
    host, port = listener.address
    left = Link.listen(listener, Worker(RIGHT, world.identity(expected).certificate), terms(LEFT), Contract(), options=QUICK)
    peer = Worker(LEFT, world.identity(trusted).certificate, f"{host}:{port}")
    right = Link.connect(peer, Endpoint(world.identity(dialler)), terms(RIGHT), Contract(), options=options)
    try:
        with pytest.raises(LinkError) as caught:
            right.wait_open(HANG)
        wait_until(lambda: listener.refusals)
        assert left.error is None, "a stranger must not break the link of the right peer"
        return str(caught.value), list(listener.refusals)
    finally:
        right.close()
        left._loop.call(left._session.stop)
        left.close()
        listener.close()


def test_a_client_that_the_roster_does_not_name_is_refused_on_both_sides(world):
    error, refusals = attempt(world, dialler="stranger")
    assert "unknown ca" in error and "roster" in error
    assert "self-signed certificate" in refusals[0] or "unable to get local issuer" in refusals[0]


def test_a_server_with_the_certificate_of_another_stage_is_refused_on_both_sides(world):
    error, refusals = attempt(world, server="another stage")
    assert "is not that of replica 0 stage 0" in error
    assert f"expected {world.identity('left').fingerprint}, shown {world.identity('another stage').fingerprint}" in error
    assert "reconnect_seconds" not in error, "more time would not help"
    assert "unknown ca" in refusals[0].lower().replace("_", " ")


def test_an_expired_client_is_refused_on_both_sides(world):
    world.identity("expired", days=30, starts=PAST)
    error, refusals = attempt(world, dialler="expired", expected="expired")
    assert "certificate expired" in error
    assert "certificate has expired" in refusals[0]


def test_an_expired_server_is_refused_on_both_sides(world):
    world.identity("expired", days=30, starts=PAST)
    error, refusals = attempt(world, server="expired", trusted="expired")
    assert "certificate has expired" in error
    assert "expired" in refusals[0].lower()


@pytest.fixture
def listener(world):
    listener = Listener(LOOPBACK, Endpoint(world.identity("left")), [Worker(RIGHT, world.identity("right").certificate)], QUICK)
    yield listener
    listener.close()


def test_a_cleartext_client_is_refused_with_the_reason(listener):
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"thwr" + bytes(200)):
        with socket.create_connection(listener.address) as sock:
            sock.sendall(data)
            sock.settimeout(HANG)
            answer = sock.recv(1000)
            assert len(answer) < 50, "more than an alert was sent to a stranger"
    wait_until(lambda: len(listener.refusals) == 2)
    reasons = " ".join(listener.refusals).lower().replace("_", " ")
    assert "http request" in reasons
    assert "wrong version number" in reasons or "unknown protocol" in reasons or "record" in reasons


def test_tls_1_2_is_refused_on_both_sides(world, listener):
    context = client_context(world.identity("right"), world.identity("left").certificate)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(listener.address) as sock, pytest.raises(ssl.SSLError, match=r"(?i)protocol.version"):
        context.wrap_socket(sock)
    wait_until(lambda: listener.refusals)
    assert "unsupported" in listener.refusals[0].lower()


def test_a_client_without_a_certificate_is_refused(world, listener):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=world.identity("left").certificate)
    with context.wrap_socket(socket.create_connection(listener.address)) as sock:
        sock.settimeout(HANG)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            sock.recv(10)
    wait_until(lambda: listener.refusals)
    assert "certificate" in listener.refusals[0].lower()
