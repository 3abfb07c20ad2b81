"""A word in the first bytes of a handshake by which a listener knows that a member of the roster may be calling.

It proves nothing: TLS does that, a round trip later. But it is made with a secret that only the two ends have (their keys agree on it),
so strangers cannot make the word, and a crowd of them does not push a member out. Who can read the line can repeat it, and is then one of
the crowd again.
"""

from __future__ import annotations

import hashlib
import hmac

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from thinwire.link.identity import Identity, certificate_of


def knock(identity: Identity, other: str, *, calling: bool) -> str:
    """Return the server name under which a client calls a server, of which one is this worker and one has the `other` certificate."""
    mine, theirs = certificate_of(identity.certificate), certificate_of(other)
    client, server = (mine, theirs) if calling else (theirs, mine)
    return "k" + hmac.new(agreed(identity, theirs) + client, b"thinwire knock" + server, hashlib.sha256).hexdigest()[:32]


def agreed(identity: Identity, certificate: bytes) -> bytes:
    """Return the secret that each end derives from its own private key and the other's public one; nothing if keys are of other kinds."""
    own = serialization.load_pem_private_key(identity.key_path.read_bytes(), password=None)
    public = x509.load_der_x509_certificate(certificate).public_key()
    if not (isinstance(own, ec.EllipticCurvePrivateKey) and isinstance(public, ec.EllipticCurvePublicKey)):
        return b""
    return own.exchange(ec.ECDH(), public) if own.curve.name == public.curve.name else b""
