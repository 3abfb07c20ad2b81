"""Codecs: what crosses a boundary, and how. `base.py` is the seam, `registry.py` finds them by name."""
