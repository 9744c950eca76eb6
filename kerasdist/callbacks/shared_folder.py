"""Whether all workers of a job see one folder."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from kerasdist.callbacks.backup_file import UNFINISHED
from kerasdist.job.job import Job


def name_of_run(folder: Path, job: Job) -> str | None:
    """Returns a name for this run if all workers see the chief's folder, else None.

    Each worker tries to read what the chief wrote there, and the chief what each worker wrote.
    All workers must call it.
    """
    name = secrets.token_hex(8)
    if job.is_chief:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            _probe(folder, name, job.rank).write_text(name, encoding="utf-8")
    # A worker must not look for the folder before: a network file system may remember its absence.
    name = str(job.broadcast_object("the folder of the backups", name))
    own = _probe(folder, name, job.rank)
    try:
        sees = _has(folder, name, 0)
        if sees and not job.is_chief:
            with contextlib.suppress(OSError):
                own.write_text(name, encoding="utf-8")
        seen = job.all_gather_object("whether all see the folder of the backups", sees)
        if job.is_chief:
            sees = all(seen) and all(_has(folder, name, rank) for rank in range(job.num_workers))
        shared = job.broadcast_object("whether the folder of the backups is shared", sees)
    finally:
        with contextlib.suppress(OSError):
            own.unlink()
    return name if shared else None


def _probe(folder: Path, name: str, rank: int) -> Path:
    return folder / f"backup-probe-{name}-{rank}{UNFINISHED}"


def _has(folder: Path, name: str, rank: int) -> bool:
    try:
        return _probe(folder, name, rank).read_text(encoding="utf-8") == name
    except (OSError, UnicodeDecodeError):
        return False
