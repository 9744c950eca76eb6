"""How a launcher learns that a worker has joined its job, and has not trained by itself."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

FILE = "KERASDIST_JOINED_FILE"
"""The variable with the path of a file that a worker makes; `kerasdist.launch.guard` sets it."""


def note() -> None:
    """Tells the launcher, if there is one, that this process has joined the job."""
    path = os.environ.get(FILE)
    if path:
        # A launcher that has gone, or that cannot be told, must not stop the job.
        with contextlib.suppress(OSError):
            Path(path).touch()
