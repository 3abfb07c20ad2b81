"""Several machines on one, joined by slow links: see `bed.py`. From bench/: `python -m testbed check`, `python -m testbed clean`."""

from testbed.bed import Testbed
from testbed.namespaces import obstacle
from testbed.path import Path

__all__ = ["Path", "Testbed", "obstacle"]
