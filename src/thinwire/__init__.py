"""Train one transformer across machines joined by thin links."""

__version__ = "0.1.0"
