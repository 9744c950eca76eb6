"""The C library's allocator, told to keep what a step frees for the next step.

glibc gives large blocks back to the system, and from threads other than the first it does so all
the time: two replicas of an MLP with 670,000 parameters touched 900 to 1,900 new pages in every
step, which is 2 of 13 ms; with the settings below 55 pages (docs/how-it-works.md).
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

# From malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

# Blocks from this size on still come from the system and go back to it: the largest size to which
# glibc raises its own threshold.
_LARGE_BLOCK = 32 * 2**20
# How much free memory stays at the end of the heap.
_SPARE = 2**30


@cache
def keep_freed_memory() -> None:
    """Tells glibc, once in a process; elsewhere, or where the user has told it, does nothing."""
    told = any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"))
    if sys.platform != "linux" or told or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library, or another allocator in its place
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)
    mallopt(_M_TRIM_THRESHOLD, _SPARE)
