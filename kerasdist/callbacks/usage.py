"""The memory that this process and its GPUs use."""

from __future__ import annotations

import os
import resource
import sys
from functools import cache
from pathlib import Path
from typing import Any

from kerasdist.core import gpus

_STATM = Path("/proc/self/statm")


def of_host() -> dict[str, int | None]:
    """Returns this process's memory in bytes, now and at its peak."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    now = None
    if _STATM.exists():
        now = int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")
        peak = max(peak, now)  # the kernel brings the peak up to date now and then
    return {"bytes": now, "peak_bytes": peak}


def of_gpus() -> list[dict[str, Any]]:
    """Returns the memory in bytes, and the utilization, of the NVIDIA GPUs that this process sees.

    Empty without such a GPU.
    """
    return [
        {"bytes": one.used, "of_bytes": one.total, "busy": one.busy} for one in _watch().usage()
    ]


@cache
def _watch() -> gpus.Watch:
    return gpus.Watch(gpus.visible())
