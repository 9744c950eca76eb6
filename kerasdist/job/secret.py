"""The secret that the workers of one job share, and where a worker finds it."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from kerasdist.errors import JobError

SECRET = "KERASDIST_SECRET"
"""The secret itself. ``kerasdist run`` sets it for its workers."""

SECRET_FILE = "KERASDIST_SECRET_FILE"
"""A file that holds the secret, readable by its owner alone (mode 600 or 400)."""

JOB_ID = "KERASDIST_JOB_ID"
"""A name for the job, so that a worker recognizes the chief of another job on the same port."""

_READABLE_BY_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@final
@dataclass(frozen=True)
class Credentials:
    """The credentials by which workers of one job recognize each other.

    Attributes:
        secret: The job's secret; None: the job has none.
        job_id: The job's name; empty: it has none.
    """

    secret: bytes | None = field(default=None, repr=False)
    job_id: str = ""


def credentials(environ: Mapping[str, str] = os.environ) -> Credentials:
    """Reads the job's secret and name."""
    secret = environ.get(SECRET, "").strip().encode()
    path = environ.get(SECRET_FILE)
    if not secret and path:
        secret = _content(Path(path))
    return Credentials(secret or None, environ.get(JOB_ID, ""))


def _content(path: Path) -> bytes:
    wrong = (
        f"Expected {SECRET_FILE} to name a file that holds the job's secret, readable by its owner "
        f"alone. Received: {SECRET_FILE}={str(path)!r}"
    )
    try:
        mode = path.stat().st_mode
        secret = path.read_bytes().strip()
    except OSError as error:
        raise JobError(f"{wrong}: {error.strerror}.") from error
    if mode & _READABLE_BY_OTHERS:
        raise JobError(f"{wrong}, with mode {stat.S_IMODE(mode):o}. Run: chmod 600 {path}")
    if not secret:
        raise JobError(f"{wrong}, which is empty.")
    return secret
