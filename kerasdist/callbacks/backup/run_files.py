"""The backup files of one run, in a folder that only one run can use at a time.

The first run that uses the folder holds a lock, and other runs are refused. The lock is a kernel
lock on a file, whose content names the process that holds the lock. Shared file systems (NFS,
Lustre, GPFS) pass the lock on to their servers, so other machines are refused, too. If a process
ends for any reason, its locks end, too.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, final

from kerasdist.callbacks.backup import fit_call, memory, storage, variables
from kerasdist.callbacks.backup.storage import StoredFile
from kerasdist.callbacks.backup.variables import StoredVariables
from kerasdist.cluster import kerasdist_variables
from kerasdist.core.sharding import HeldShard
from kerasdist.core.user_warnings import warn_user
from kerasdist.errors import BackupError
from kerasdist.job.handshake import JOB_ID
from kerasdist.job.job import Job, everyone

# For each folder of backups, how many calls of `fit` with this folder have ended in this process.
_ENDED: Counter[Path] = Counter()

_UNUSABLE = (BackupError, KeyError, OSError, TypeError, ValueError)

# A file of this name is written when a call of `fit` has ended and the script still runs. The file
# contains the name that `kerasdist run` has given to the job. The last backup stays until the
# script ends: if the script is restarted, the same call of `fit` restores this backup and has no
# epoch to train.
_MARK = "finished"


@final
@dataclass
class RunFiles:
    """Finds the newest backup of a run, writes new backups, and removes old ones.

    A script may call `fit` twice with the same folder. If the script is restarted during the second
    call, it makes the first call again, which must not touch the second call's backups.

    Attributes:
        folder: The folder of the run's backups.
        keep: How many of the newest backups are kept; older ones are removed.
        mode: The permissions of the files.
        job: The job of this process.
        run: A name that no other run has, if workers divide variables and all of them see the
            folder; else None.
        takes_weights: Whether the weights of another call's backup may be used.
        in_memory: The folder in this host's memory to which this process writes each backup first;
            None if this process writes no backups to memory.
        number: The number of the newest backup.
        fit: How many calls of `fit` with this folder had ended in this process before this call.
        in_parts: Whether each worker writes its own shards of the sharded variables.
        refusal: Why this run must not use the folder; None if it may.
        of_this_call: Whether the newest backup belongs to this call; if not, only its weights are
            used.
    """

    folder: Path
    keep: int
    mode: int = storage.PRIVATE
    job: Job | None = None
    run: str | None = None
    takes_weights: bool = False
    in_memory: Path | None = None

    def __post_init__(self) -> None:
        self._place = self.folder.resolve()
        self.in_parts = self.run is not None
        self._job_of_parts = self.job if self.in_parts else None
        self.fit = _ENDED[self._place]
        self.refusal: str | None = None
        self.of_this_call = True
        self._copying: Future[None] | None = None
        self.number = max(map(storage.number_of, self._all()), default=0)

    @property
    def _is_chiefs(self) -> bool:
        return self.job is None or self.job.is_chief

    def newest(self, call: Mapping[str, object]) -> StoredVariables | None:
        """Returns the newest complete backup; None if there is no complete backup.

        Damaged backups are reported. All workers must call this method. If `in_parts` is False,
        workers other than the chief get None. If this run must not use the folder, `refusal` is set
        on the chief; the caller must send it to all workers.
        """
        if self._is_chiefs:
            found = self._first_whole(self._fitting(call))
            if found is None and self._own() != self._all() and self.refusal is None:
                warn_user(
                    f"The backups in {self.folder} belong to a later call of fit in this script, "
                    "so they are kept, and this call trains again. To avoid that, give each call "
                    "of fit its own folder, and the first call delete_checkpoint=False."
                )
            return found
        return self._first_whole(iter(())) if self.in_parts else None

    def _fitting(self, call: Mapping[str, object]) -> Iterator[StoredFile]:
        """Yields the chief's file of each backup that this call of `fit` may use, newest first.

        Raises:
            BackupError: If this run must not use the folder.
        """
        try:
            hold_folder(self.folder, self.mode)
        except BackupError:
            raise
        except OSError as error:
            raise BackupError(
                "Expected a folder of backups that this process can write. Received: "
                f"{str(self.folder)!r}: {error.strerror}. Take another one."
            ) from error
        storage.remove_unfinished(self.folder)
        variables.remove_orphans(self.folder)
        mark = _mark_of(self.folder)
        if mark is not None and (self.fit or mark != _run_of_launcher()):
            _remove_finished(self.folder, mark, self.fit if mark == _run_of_launcher() else None)
        for path in self._own():
            try:
                stored = storage.read(path)
                there = {name: stored.facts[name] for name in call if name in stored.facts}
            except _UNUSABLE as error:
                _refuse(path, error)
                continue
            here = {name: call[name] for name in there}
            self.of_this_call = fit_call.is_same(
                path, there, here, takes_weights=self.takes_weights
            )
            yield stored

    def _first_whole(self, candidates: Iterator[StoredFile]) -> StoredVariables | None:
        """Returns the first backup among the chief's `candidates` whose parts are complete.

        If `in_parts` is True, each worker checks some of the parts.
        """
        while True:
            try:
                stored = next(candidates, None)
            except BackupError as error:
                stored, self.refusal = None, str(error)
            chiefs = None if stored is None else stored.path.name
            [name, *_] = everyone(self._job_of_parts, "a backup", chiefs)
            if name is None:
                return None
            path = self.folder / name if stored is None else stored.path
            found, complaint = None, None
            try:
                found = self._checked(stored or StoredFile(path))
            except _UNUSABLE as error:
                complaint = str(error) or repr(error)
            complaints = everyone(self._job_of_parts, "what is wrong with a backup", complaint)
            if not any(complaints):
                return found
            if stored is not None:
                _refuse(path, next(filter(None, complaints)))

    def _checked(self, chiefs: StoredFile) -> StoredVariables:
        """Returns a backup after a check of some of its parts; other workers check other parts."""
        job = self._job_of_parts
        rank, workers = (0, 1) if job is None else (job.rank, job.num_workers)
        variables.require_whole_parts(self.folder, chiefs.facts.get("parts", [])[rank::workers])
        return StoredVariables(chiefs, rank)

    def begin_next(self) -> None:
        """Waits until the previous backup is on the disk; sets `number` for the next backup."""
        self.wait()
        self.number += 1

    def write_part(self, shards: Mapping[int, Sequence[HeldShard]]) -> list[object] | None:
        """Writes this worker's part of a backup; the chief gets the parts' names and digests.

        All workers must call this method. When it returns, the parts of all workers are on the
        disk. If a worker could not write its part, all workers get None.

        Args:
            shards: The shards that this worker holds, by the number of the variable.
        """
        assert self.job is not None
        rank, own, error = self.job.rank, {}, None
        try:
            # No other run has the name `self.run`, so this part replaces no part of another backup.
            path = storage.path_of(self.folder, self.number, f"-{self.run}-part{rank}")
            own = variables.write_part(path, shards, self.mode)
        except OSError as caught:
            error = str(caught)
        told = self.job.gather_object("a part of a backup", [own, error])
        failed = [f"worker {rank}: {error}" for rank, (_, error) in enumerate(told) if error]
        failed = self.job.broadcast_object("parts that were not written", failed)
        if not failed:
            return [part for part, _ in told]
        if self.job.is_chief:
            self._give_up("; ".join(failed))
        return None

    def write(self, facts: Mapping[str, object], arrays: Sequence[Any]) -> bool:
        """Writes a backup and removes old ones; returns True on the chief if the backup is written.

        With `in_memory`, the backup is written to memory if there is enough memory. A thread then
        copies the chief's file to the disk. All workers must call this method, because reading a
        variable may be a collective.
        """
        folder = self.folder
        if self.in_memory is not None and memory.has_room(self.in_memory, arrays):
            folder = self.in_memory
        elif not self._is_chiefs:
            storage.read_along(arrays)
            return False
        path = storage.path_of(folder, self.number)
        try:
            storage.write_file(path, facts, arrays, self.mode)
            self._remove_old(folder)
        except OSError as error:
            self._give_up(error, folder)
            return False
        if folder != self.folder and self._is_chiefs:
            threads = ThreadPoolExecutor(1, "kerasdist-backup")
            self._copying = threads.submit(self._copy, path)
            threads.shutdown(wait=False)
        return self._is_chiefs

    def _copy(self, path: Path) -> None:
        """Copies a backup to the disk, and removes old backups."""
        with path.open("rb") as file:
            storage.write_bytes(self.folder / path.name, storage.read_bytes(file), self.mode)
        self._remove_old(self.folder)

    def wait(self) -> None:
        """Waits until the newest backup is on the disk."""
        copying, self._copying = self._copying, None
        if copying is not None:
            try:
                copying.result()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, why: object, folder: Path | None = None) -> None:
        with contextlib.suppress(OSError):
            variables.remove_orphans(self.folder, up_to=self.number)
        warn_user(
            f"Backup {self.number} could not be written to {folder or self.folder}: {why}. "
            "Training goes on, and the next backup is written when it is due. Until then a restart "
            "continues from the newest backup that exists."
        )

    def training_ended(self, *, removes: bool) -> None:
        """Notes that this call of `fit` has ended. The chief unlocks the folder for other runs.

        With `removes`, the backups of this call are removed. Under ``kerasdist run`` the last
        backup stays until the scripts of all workers end.
        """
        _ENDED[self._place] += 1
        self.wait()
        if self.in_memory is not None:
            with contextlib.suppress(OSError):
                storage.remove(path for path in self._own() if path.parent == self.in_memory)
                self.in_memory.rmdir()  # fails if a later call of `fit` has copies in the folder
                self.in_memory.parent.rmdir()
        if not self._is_chiefs:
            return
        if removes:
            run, own = _run_of_launcher(), self._own()
            with contextlib.suppress(OSError):
                if run is not None and own:
                    (self.folder / _MARK).write_text(run, encoding="utf-8")
                    gone = partial(_remove_finished, self._place, run)
                    if self.job is not None:
                        self.job.at_leave(gone)
                    else:
                        atexit.register(lambda: _is_failing() or gone())
                    own = own[1:]
                self._remove(self.folder, own)
        release_folder(self.folder)

    def _remove_old(self, folder: Path) -> None:
        own = [path for path in self._own() if path.parent == folder]
        self._remove(folder, own[self.keep :])

    def _remove(self, folder: Path, paths: Sequence[Path]) -> None:
        """Removes backups: first the chief's files, and then the parts that these files name.

        So no process finds a chief's file whose parts no longer exist.
        """
        storage.remove(paths)
        variables.remove_orphans(folder, up_to=self.number)

    def _all(self) -> list[Path]:
        """Returns all backups, newest first; a copy in memory comes before the copy on disk."""
        folders = [self.folder] if self.in_memory is None else [self.in_memory, self.folder]
        found = [path for folder in folders for path in storage.newest_first(folder)]
        return sorted(found, key=storage.number_of, reverse=True)

    def _own(self) -> list[Path]:
        """Returns the backups that do not belong to later calls of `fit`, newest first."""
        return [path for path in self._all() if _fit_of(path) <= self.fit]


def _is_failing() -> bool:
    """Returns whether this process ends because of an error."""
    return getattr(sys, "last_value", None) is not None


def _run_of_launcher() -> str | None:
    """Returns a name for the ``kerasdist run`` that started this process; None if there is none.

    The name stays the same when ``kerasdist run`` restarts the job.
    """
    if kerasdist_variables.RESTART not in os.environ:
        return None
    return os.environ.get(JOB_ID, "").rpartition("-")[0] or None


def _mark_of(folder: Path) -> str | None:
    """Returns the name of the run that has written the file `_MARK`; None if there is no file."""
    try:
        return (folder / _MARK).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _remove_finished(folder: Path, run: str, ended: int | None = None) -> None:
    """Removes backups of ended calls of `fit`, if the file `_MARK` still names this `run`.

    `ended`: how many calls have ended. Backups of later calls are not removed. None: all backups
    are removed.
    """
    with contextlib.suppress(OSError):
        if _mark_of(folder) == run:
            left = storage.newest_first(folder)
            storage.remove(path for path in left if ended is None or _fit_of(path) < ended)
            variables.remove_orphans(folder)
            (folder / _MARK).unlink()


def _fit_of(path: Path) -> int:
    """Reads from a backup how many calls of `fit` had ended before the call that wrote it.

    The result is 0 for a damaged file.
    """
    try:
        return int(StoredFile(path).facts["fit"])
    except _UNUSABLE:
        return 0


def _refuse(path: Path, reason: object) -> None:
    warn_user(f"The backup {path} is not used: {reason}. An older backup is used if there is one.")


_LOCK = "in-use.json"

# How long to wait for a lock that another machine holds: a little longer than a file server keeps
# the locks of a lost machine (NFS: 90 s).
_SECONDS = 100.0
_PAUSE = 1.0

_IS_HELD = (errno.EACCES, errno.EAGAIN)
_IS_FULL = (errno.ENOSPC, errno.EDQUOT)

# The files that this process has locked, with their descriptors.
# The files stay open, because closing a file ends all locks of the process on this file.
_held: dict[Path, int] = {}


def hold_folder(folder: Path, mode: int = 0o600) -> None:
    """Locks the folder for this process, until `release_folder` or the end of the process.

    Raises:
        BackupError: If another process has locked the folder.
        OSError: If the folder cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.resolve() / _LOCK
    if path in _held:
        return
    until = time.monotonic() + _SECONDS
    while True:
        owner = _try_lock(path, mode)
        if owner is None:
            return
        # If a process of this machine holds the lock, that process is alive, so waiting is useless.
        # For a process of another machine, this loop waits: the file system may keep the lock for a
        # time after that process has ended.
        if owner.get("host") == socket.gethostname() or time.monotonic() > until:
            raise BackupError(
                f"Expected a folder of backups that no other run uses. Received: {str(folder)!r}, "
                f"which process {owner.get('pid')} on {owner.get('host')} has used since "
                f"{owner.get('since')}. Take another folder, or end that process first."
            )
        time.sleep(_PAUSE)


def release_folder(folder: Path) -> None:
    """Unlocks the folder for other runs."""
    path = folder.resolve() / _LOCK
    file = _held.pop(path, None)
    if file is not None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        os.close(file)


def _try_lock(path: Path, mode: int) -> dict[str, object] | None:
    """Tries to lock a file; if another process holds the lock, returns facts about that process.

    The result is None if this process now has the lock. It is also None, after a warning, if the
    file system is full or cannot lock files.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno not in _IS_FULL:
            raise
        _warn_of_lock(path, error)
        return None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        with contextlib.closing(os.fdopen(file, "rb")) as opened:
            if error.errno in _IS_HELD:
                with contextlib.suppress(ValueError):
                    return json.loads(opened.read())
                return {}  # the process with the lock has not yet written the file completely
        _warn_of_lock(path, error)
        return None
    if not _is_still(path, file):  # the former owner has removed the file that was opened above
        os.close(file)
        return _try_lock(path, mode)
    _held[path] = file
    since = datetime.now(UTC).isoformat(" ", "seconds")
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
    with contextlib.suppress(OSError):  # the disk may be full
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(owner).encode(), 0)
    return None


def _is_still(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _warn_of_lock(path: Path, error: OSError) -> None:
    warn_user(
        f"{path} cannot be locked: {error.strerror}. If another run uses this folder of backups, "
        "neither run notices the other, and each removes the other's backups."
    )


def name_of_run(folder: Path, job: Job) -> str | None:
    """Returns a name for this run if all workers can write to the chief's folder, else None.

    Each worker looks for a file that the chief makes in the folder under this name. All workers
    must call this function.
    """
    name = secrets.token_hex(8)
    if job.is_chief:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            _probe(folder, name).touch()
    # Workers look only after the chief has made the folder, because otherwise a network
    # file system may keep in its cache that the folder is missing.
    name = str(job.broadcast_object("the folder of the backups", name))
    found = _probe(folder, name)
    sees = found.is_file() and os.access(folder, os.W_OK)
    seen = job.all_gather_object("whether all see the folder of the backups", sees)
    if job.is_chief:
        with contextlib.suppress(OSError):
            found.unlink(missing_ok=True)
    return name if all(seen) else None


def _probe(folder: Path, name: str) -> Path:
    return folder / f"unfinished-probe-backup-{name}"
