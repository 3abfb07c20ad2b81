"""The uncompressed boundary: the whole residual stream, D numbers per token and direction."""

from __future__ import annotations

from thinwire.codecs.base import Codec


class Dense(Codec):
    """Send the D-wide stream in the wire's number format."""
