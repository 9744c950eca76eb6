"""Files that the chief writes for all workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kerasdist.core import whole_files
from kerasdist.errors import WorkerLostError
from kerasdist.job.job import Job


def write_and_tell(write: Callable[[], None], path: str, job: Job) -> None:
    """Lets the chief write a file, and tells the workers that wait for it."""
    try:
        write()
    except BaseException as error:
        job.wrote(path, {"error": f"{type(error).__name__}: {error}"[:500]})
        raise
    job.wrote(path, {"modified": None if whole_files.is_remote(path) else _modified(path)})


def is_written_by_chief(path: str, job: Job) -> bool:
    """Waits for the chief; returns whether it has written this path on a shared file system."""
    outcome = job.written_by_chief(path)
    if "error" in outcome:
        raise WorkerLostError(
            f"[worker {job.rank}/{job.num_workers}] Expected worker 0 to save the model for all "
            f"workers. Received: path={path!r}, with {outcome['error']}. The error is in the "
            "output of worker 0."
        )
    if not outcome:
        return False
    modified = outcome["modified"]
    # Without a file system that the workers share, each has a file of its own.
    return modified is None or (_modified(path) or 0) >= modified


def _modified(path: str) -> int | None:
    """Returns when a file was written, in nanoseconds; None if it does not exist."""
    try:
        return Path(path).stat().st_mtime_ns
    except FileNotFoundError:
        return None
