"""A word in the first bytes of a handshake by which a listener knows that a member of the roster may be calling.

It proves nothing: TLS does that, a round trip later. But only members know each other's certificates (TLS 1.3 shows a client's to nobody
but the server that has proven itself), so strangers cannot make the word, and a crowd of them does not push a member out. Who can read
the line can repeat it, and is then one of the crowd again.
"""

from __future__ import annotations

import hashlib
import hmac

from thinwire.link.tls import certificate_of


def knock(client: str, server: str) -> str:
    """Return the server name under which a client (certificate in PEM) calls a server."""
    return "k" + hmac.new(certificate_of(client), b"thinwire knock" + certificate_of(server), hashlib.sha256).hexdigest()[:32]
