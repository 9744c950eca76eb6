"""Tells the launcher that a worker has joined its job, so that it does not train alone."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

FILE = "KERASDIST_JOINED_FILE"
"""The path of a file that a worker makes; `kerasdist.launch.supervisor` sets it."""


def tell_launcher() -> None:
    """Makes the file that tells the launcher that this process has joined the job."""
    path = os.environ.get(FILE)
    if path:
        # A launcher that is gone must not stop the job.
        with contextlib.suppress(OSError):
            Path(path).touch()
