"""Mutual TLS 1.3 with the roster's certificates as the only trust anchors.

Python's ssl cannot pin a fingerprint, so the peer's whole certificate is loaded as anchor, and after the handshake its bytes are compared
with the roster's (`certificate_of` gives both sides of the comparison). There is no cleartext mode.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable

from thinwire.link.identity import Identity, certificate_of, fingerprint
from thinwire.link.options import SERVICES


def client_context(identity: Identity, peer: str, service: str | None = None) -> ssl.SSLContext:
    """Trust one certificate only; ask for a service, or for the link of two neighbours."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, identity, [peer])
    if service is not None:
        context.set_alpn_protocols([service])
    return context


def server_context(identity: Identity, peers: Iterable[str]) -> ssl.SSLContext:
    """Trust the given certificates only, and ask the client for one of them."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, identity, peers)
    context.num_tickets = 0  # sessions are never resumed
    context.set_alpn_protocols(SERVICES)
    return context


def _context(protocol: int, identity: Identity, anchors: Iterable[str]) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False  # the whole certificate is compared instead
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(identity.certificate_path, identity.key_path)
    for anchor in anchors:
        trust(context, anchor)
    return context


def trust(context: ssl.SSLContext, pem: str) -> None:
    """Make a certificate a trust anchor: the very bytes that are compared, and no others."""
    try:
        context.load_verify_locations(cadata=certificate_of(pem))
    except ssl.SSLError as error:
        raise ValueError(
            f"TLS cannot use the certificate with the fingerprint {fingerprint(pem)} ({error.reason or error}); "
            "make that worker's identity again with `thinwire keys`"
        ) from None
