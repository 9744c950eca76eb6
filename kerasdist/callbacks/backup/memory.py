"""Copies of backups in the memory of hosts, so that a restarted job does not need the disk.

A restart ends all processes. So a copy is a file in the memory of a host (``/dev/shm``), which
remains when the processes end. The chief writes one copy, and on each other host one worker writes
the same copy from its own variables. So if a host is lost, the other hosts still have the copy. The
launcher chooses the folder of the copies, which stays the same when the job is restarted. The
launcher removes this folder at the end of the job.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import math
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from kerasdist.callbacks.backup import storage
from kerasdist.callbacks.backup.storage import Unread
from kerasdist.core.user_warnings import warn_user
from kerasdist.errors import UnsupportedError
from kerasdist.job.job import Job
from kerasdist.job.launcher import MEMORY

# How many bytes of a copy one message carries. In base64 they take a third more, and a message may
# have at most 64 MiB.
_CHUNK = 16 << 20

# How many bytes must be free besides the bytes of the arrays, because the file also has a header.
_HEADER = 16 << 20


def prepare(place: Path, job: Job | None, *, sends: bool) -> Path | None:
    """Returns the folder in memory to which this worker writes copies of backups.

    The result is None if another worker of the same host writes the copies. If another host has a
    newer copy than the chief's host, the newer copy is sent to the chief's host. All workers must
    call this function. ``sends``: whether the model belongs to a strategy, which can send the
    chief's arrays to the other workers.

    Raises:
        UnsupportedError: If this job cannot keep backups in memory.
    """
    if job is not None and not sends:
        raise UnsupportedError(
            "Expected a model that was made in the scope of a strategy of all workers, for "
            "keep_in_memory=True. Received: a model made outside of a scope. Make it in "
            "`with strategy.scope():`."
        )
    there = os.environ.get(MEMORY)
    if not there:
        raise UnsupportedError(
            "Expected a worker of `kerasdist run`, which starts it again and then removes the "
            f"copies, for keep_in_memory=True. Received: no {MEMORY} in the environment. Start the "
            "script by `kerasdist run`, or leave keep_in_memory out."
        )
    _make_private(Path(there))
    folder = Path(there, hashlib.sha256(os.fsencode(place.resolve())).hexdigest()[:16])
    writes = job is None or job.is_chief or job.membership.local_rank == 0
    if writes:
        storage.remove_unfinished(folder)
    if job is not None:
        bring_newest(folder, place, job)
    return folder if writes else None


def _make_private(folder: Path) -> None:
    """Makes a folder, or checks that an existing folder belongs to this user."""
    try:
        folder.mkdir(exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError("it is not a folder of this user")
        folder.chmod(0o700)
    except OSError as error:
        raise UnsupportedError(
            "Expected a folder of this user in a file system in memory, for keep_in_memory=True. "
            f"Received: {str(folder)!r}: {error}. Leave keep_in_memory out on this system."
        ) from error


def has_room(folder: Path, arrays: Sequence[Unread | np.ndarray]) -> bool:
    """Returns whether arrays fit into the memory that holds the folder; warns if they do not."""
    needed = sum(one.dtype.itemsize * math.prod(one.shape) for one in arrays)
    free = 0
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    if free > needed + _HEADER:
        return True
    warn_user(
        f"Expected {needed:,} free bytes for a backup in {folder}. Received: {free:,} free bytes. "
        "So the backup is written only to the disk. Containers have 64 MiB in /dev/shm unless they "
        "are started with more (docker run --shm-size)."
    )
    return False


def bring_newest(memory: Path, disk: Path, job: Job) -> None:
    """Sends the newest copy to the chief, unless the chief already has an equally new backup.

    The chief may run on a host without a copy if its former host was lost. If the chief cannot
    write the copy, it warns and continues without a copy. All workers must call this function.
    """
    listed = storage.newest_first(memory)
    own = [storage.number_of(listed[0]), listed[0].stat().st_size] if listed else [0, 0]
    if job.is_chief:
        own[0] = max([own[0], *map(storage.number_of, storage.newest_first(disk))])
    source, number, size = job.choose("newest backups in memory", own, _newest)
    if source == 0:
        return
    with listed[0].open("rb") if job.rank == source else contextlib.nullcontext() as file:
        chunks = _sent(job, source, file, size)
        if job.is_chief:
            try:
                storage.write_bytes(storage.path_of(memory, number), chunks)
            except OSError as error:
                warn_user(f"The backup in worker {source}'s memory cannot be kept here: {error}.")
        for _ in chunks:  # all workers exchange the chunks, even if the chief cannot keep them
            pass


def _sent(job: Job, source: int, file: BinaryIO | None, size: int) -> Iterator[bytes]:
    """Yields the chunks of worker `source`'s file on the chief, and empty bytes on the others."""
    for _ in range(0, size, _CHUNK):
        own = None if file is None else base64.b64encode(file.read(_CHUNK)).decode()
        found = job.gather_object("a backup in memory", own)
        yield base64.b64decode(found[source]) if found else b""


def _newest(everyone: list[list[int]]) -> list[int]:
    """Returns the rank of the first worker with the newest copy, and the copy's number and size."""
    source = max(range(len(everyone)), key=lambda rank: everyone[rank][0])
    return [source, *everyone[source]]
