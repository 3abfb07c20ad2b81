"""Why TCP and TLS did not reach a peer, told apart, each with what helps. Words only, no I/O."""

from __future__ import annotations

import errno
import hashlib
import socket
import ssl

from thinwire.link.problem import Problem

UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, getattr(errno, "EHOSTDOWN", errno.EHOSTUNREACH), errno.EADDRNOTAVAIL)
FORBIDDEN = (errno.EPERM, errno.EACCES)


def not_connected(address: str, error: OSError | UnicodeError) -> Problem:
    """Tell why there is no TCP connection."""
    reason = getattr(error, "strerror", None) or str(error)
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return Problem(
            f"the name in {address} has no address ({reason})",
            "check its spelling in the roster and this machine's DNS, or write a number instead of the name",
            patience=False,
        )
    if error.errno == errno.ECONNREFUSED:
        return Problem(
            f"{address} refused the connection: the machine answers, but nothing listens on that port",
            "start the worker there, or correct the port in the roster or in its router's forwarding",
        )
    if error.errno in UNREACHABLE:
        return Problem(
            f"{address} is unreachable ({reason}): there is no way to it from here",
            "check this machine's network or VPN, and the address in the roster",
        )
    if error.errno == errno.ETIMEDOUT:
        return no_answer(address)
    if error.errno in FORBIDDEN:
        return Problem(
            f"this machine forbids the connection to {address} ({reason})", "allow it in the local firewall or sandbox", patience=False
        )
    return Problem(f"{address}: {reason}")


def no_answer(address: str, seconds: float | None = None) -> Problem:
    """Tell that TCP got no answer."""
    within = "" if seconds is None else f" within {seconds:g} s"
    return Problem(
        f"{address} did not answer{within}: no TCP connection",
        "is that machine on, is its address in the roster right, and do its firewall and router let the port in?",
    )


def no_handshake(address: str, seconds: float | None = None) -> Problem:
    """Tell that something took the connection and said nothing."""
    within = "" if seconds is None else f" within {seconds:g} s"
    return Problem(
        f"{address} took the connection, but no TLS handshake followed{within}",
        "see whether the worker listens on that port or another program does, and whether machine and line are overloaded",
    )


def hung_up(address: str, error: OSError) -> Problem:
    """Tell that the connection ended in its handshake."""
    return Problem(
        f"{address} ended the connection during the TLS handshake ({error.strerror or error})",
        "the worker there may be starting or overloaded; if it stays so, another program listens on that port",
    )


def no_tls(address: str, error: ssl.SSLError) -> Problem:
    """Tell that whatever answers does not speak our TLS."""
    return Problem(
        f"what answers at {address} does not speak TLS 1.3 with us ({error.reason or error})",
        "another program has that port: end it, or correct the address in the roster",
        patience=False,
    )


def wrong_certificate(peer: object, address: str, expected: str, shown: bytes | None, reason: str) -> Problem:
    """Tell which certificate was expected (a fingerprint) and which one was shown (DER)."""
    found = "one that could not be read" if shown is None else hashlib.sha256(shown).digest().hex(":").upper()
    if found == expected:
        return Problem(
            f"the certificate of {peer} at {address}, {expected}, is not valid ({reason})",
            "check the clocks of both machines; if it has expired, make a new one there with `thinwire keys` and write the roster again",
            patience=False,
        )
    return Problem(
        f"the certificate shown at {address} is not that of {peer} in the roster ({reason}): expected {expected}, shown {found}",
        "compare fingerprints with whoever runs it and write the roster again, or correct the address if somebody else is there",
        patience=False,
    )
