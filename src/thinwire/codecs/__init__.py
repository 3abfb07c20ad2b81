"""Codecs: what crosses a boundary, and how. `base.py` is the seam, `build.py` makes one from its options."""
