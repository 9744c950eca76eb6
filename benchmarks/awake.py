"""Keeps the cores awake while others are timed.

A step of a tenth of a millisecond is a relay: threads hand over to each other, and whoever waits
sleeps. When a core has nothing at all to run, it halts; on a virtual machine it then takes some
tens of microseconds until it runs again, and which contender pays for that how often is chance. A
process that runs only when nothing else wants the core (``SCHED_IDLE``) keeps it from halting.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

_SPIN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while os.getppid() == int(sys.argv[2]):
    for _ in range(1_000_000):
        pass
"""


@contextlib.contextmanager
def cores_awake() -> Iterator[None]:
    """Keeps all cores of this process from halting inside the block."""
    command = [sys.executable, "-S", "-c", _SPIN]
    spinners = [
        subprocess.Popen([*command, str(core), str(os.getpid())])
        for core in sorted(os.sched_getaffinity(0))
    ]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
