"""A folder of backups has one run at a time: the first holds a lock, and others are refused.

It is a lock of the kernel on a file that names its owner. Shared file systems (NFS, Lustre, GPFS)
pass it on to their servers, and whatever ends a process ends its locks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kerasdist.core.user_warnings import warn_user
from kerasdist.errors import BackupError

NAME = "in-use.json"

# How long a server keeps the locks of a machine that is gone (NFS: 90 s), and some more.
_SECONDS = 100.0
_PAUSE = 1.0

_IS_HELD = (errno.EACCES, errno.EAGAIN)
_IS_FULL = (errno.ENOSPC, errno.EDQUOT)

# The files that this process holds. It must open none of them anew: to close any copy of a file
# ends the locks of the whole process.
_held: dict[Path, int] = {}


def hold(folder: Path, mode: int = 0o600) -> None:
    """Takes the folder for this process, until `release` or the end of the process.

    Raises:
        BackupError: If another process has it.
        OSError: If the folder cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.resolve() / NAME
    if path in _held:
        return
    until = time.monotonic() + _SECONDS
    while True:
        owner = _try(path, mode)
        if owner is None:
            return
        # On this machine a held lock means a live process. Another one may be gone, and the file
        # system hold its locks for a while.
        if owner.get("host") == socket.gethostname() or time.monotonic() > until:
            raise BackupError(
                f"Expected a folder of backups that no other run uses. Received: {str(folder)!r}, "
                f"which process {owner.get('pid')} on {owner.get('host')} has used since "
                f"{owner.get('since')}. Take another folder, or end that process first."
            )
        time.sleep(_PAUSE)


def release(folder: Path) -> None:
    """Gives the folder to others."""
    path = folder.resolve() / NAME
    file = _held.pop(path, None)
    if file is not None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        os.close(file)


def _try(path: Path, mode: int) -> dict[str, Any] | None:
    """Takes the lock; returns the present owner if there is one."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno not in _IS_FULL:
            raise
        _warn(path, error)
        return None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        with contextlib.closing(os.fdopen(file, "rb")) as opened:
            if error.errno in _IS_HELD:
                return _owner(opened.read())
        _warn(path, error)
        return None
    if not _is_still(path, file):  # its owner has ended since, and removed it
        os.close(file)
        return _try(path, mode)
    _held[path] = file
    since = datetime.now(UTC).isoformat(" ", "seconds")
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
    with contextlib.suppress(OSError):  # a full disk
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(owner).encode(), 0)
    return None


def _is_still(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _owner(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError:  # it is just writing
        found = None
    return found if isinstance(found, dict) else {}


def _warn(path: Path, error: OSError) -> None:
    warn_user(
        f"{path} cannot be locked: {error.strerror}. If another run uses this folder of backups, "
        "neither notices it, and each removes the other's."
    )
