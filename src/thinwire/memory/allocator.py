"""Let freed tensors really leave the process.

glibc raises the size from which it maps memory of its own, up to 32 MB, each time such a piece is freed, and keeps what is smaller in
heaps full of holes: a stage within its budget by our count then held 1.8 times as much of the machine's memory. With a fixed size every
tensor of some length is mapped when it is made and given back when it is freed.
"""

from __future__ import annotations

import ctypes
import sys

MMAP_THRESHOLD = -3
"""The number of that setting in glibc's malloc.h."""
MAPPED_BYTES = 256 * 2**10
"""From this size on a piece of memory is mapped."""


def return_freed_memory() -> bool:
    """Fix the size from which memory is mapped, for this process; return whether its allocator knows such a thing."""
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):  # another C library
        return False
    return bool(library.mallopt(MMAP_THRESHOLD, MAPPED_BYTES))
