"""The backup files of one run."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

from kerasdist.backends.base.pieces import HeldPiece
from kerasdist.callbacks import backup_call, backup_file, backup_parts, folder_lock
from kerasdist.callbacks.backup_file import Backup, StoredFile
from kerasdist.callbacks.backup_parts import StoredVariables
from kerasdist.cluster import kerasdist_variables
from kerasdist.core.user_warnings import warn_user
from kerasdist.errors import BackupError
from kerasdist.job.job import Job
from kerasdist.job.secret import JOB_ID

# How many calls of `fit` of this process have ended, by folder.
_ENDED: Counter[Path] = Counter()

_UNUSABLE = (BackupError, KeyError, OSError, TypeError, ValueError)

# Says of which run of the launcher a call of `fit` has ended, whose script has not: that it is
# started again may be for an error after `fit`, which then has no epoch left to train.
_MARK = "finished"


@final
class RunFiles:
    """Finds the newest backup of a run, writes new ones, and removes old ones.

    A script may call `fit` twice with one folder. If it is restarted during the second call, the
    first call must not touch the second one's backups.

    Attributes:
        number: The number of the newest backup.
        fit: How many calls of `fit` with this folder have ended before in this process.
        in_parts: Whether each worker writes what it holds of the divided variables.
        refusal: Why this run must not use the folder; None if it may.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        mode: int = backup_file.PRIVATE,
        job: Job | None = None,
        run: str | None = None,
    ) -> None:
        """Looks into the folder.

        Args:
            folder: The folder of the run's backups.
            keep: How many backups stay.
            mode: The permissions of the files.
            job: The job of this process.
            run: A name that no other run has, if all workers see the folder and divide variables.
        """
        self._folder = folder
        self._keep = keep
        self._mode = mode
        self._job = job
        self._run = run
        self._place = folder.resolve()
        self._of_later_calls: set[Path] = set()
        self.in_parts = run is not None
        self.fit = _ENDED[self._place]
        self.refusal: str | None = None
        self.number = max(map(backup_file.number_of, self._all()), default=0)

    @property
    def _is_chiefs(self) -> bool:
        return self._job is None or self._job.is_chief

    def newest(self, call: Mapping[str, Any]) -> StoredVariables | None:
        """Returns the newest backup that is complete, None if there is none.

        It says which backups are torn. All workers must call it; where they do not see the chief's
        folder, only the chief gets a backup. The chief sets `refusal`, which all must hear of.
        """
        if self._is_chiefs:
            found = self._first_whole(self._fitting(call))
            if found is None and self._of_later_calls and self.refusal is None:
                warn_user(
                    f"The backups in {self._folder} are of a later call of fit of this script, "
                    "for which they stay: this call trains again. Give each call of fit a folder "
                    "of its own, and the first one delete_checkpoint=False, so that it need not."
                )
            return found
        return self._first_whole(iter(())) if self.in_parts else None

    def _fitting(self, call: Mapping[str, Any]) -> Iterator[StoredFile]:
        """Yields the chief's files of backups of this call, newest first."""
        try:
            folder_lock.hold(self._folder, self._mode)
        except BackupError as error:
            self.refusal = str(error)
            return
        except OSError as error:
            self.refusal = (
                "Expected a folder of backups that this process can write. Received: "
                f"{str(self._folder)!r}: {error.strerror}. Take another one."
            )
            return
        backup_file.remove_unfinished(self._folder)
        backup_parts.remove_orphans(self._folder)
        mark = _mark_of(self._folder)
        if mark is not None and (self.fit or mark != _run_of_launcher()):
            _remove_finished(self._folder, mark)
        self._of_later_calls = {path for path in self._all() if _fit_of(path) > self.fit}
        for path in self._own():
            try:
                stored = backup_file.read(path)
                there = {name: stored.facts[name] for name in call if name in stored.facts}
            except _UNUSABLE as error:
                _refuse(path, error)
                continue
            try:
                backup_call.require_same(path, there, {name: call[name] for name in there})
            except BackupError as error:
                self.refusal = str(error)
                return
            yield stored

    def _first_whole(self, candidates: Iterator[StoredFile]) -> StoredVariables | None:
        """Returns the first of the chief's candidates whose parts are whole.

        Workers that see the folder check some of the parts each.
        """
        while True:
            stored = next(candidates, None)
            chiefs = None if stored is None else stored.path.name
            [name, *_] = self._gathered("a backup", chiefs)
            if name is None:
                return None
            path = self._folder / name
            found, complaint = None, None
            try:
                found = self._checked(stored or StoredFile(path))
            except _UNUSABLE as error:
                complaint = str(error) or repr(error)
            complaints = self._gathered("what is wrong with a backup", complaint)
            if not any(complaints):
                return found
            if stored is not None:
                _refuse(path, next(filter(None, complaints)))

    def _checked(self, chiefs: StoredFile) -> StoredVariables:
        """Checks this worker's share of a backup's parts."""
        rank, workers = 0, 1
        if self._job is not None and self.in_parts:
            rank, workers = self._job.rank, self._job.num_workers
        backup_parts.require_whole(self._folder, backup_parts.named(chiefs.facts)[rank::workers])
        return StoredVariables(chiefs)

    def _gathered(self, label: str, value: Any) -> list[Any]:
        if self._job is None or not self.in_parts:
            return [value]
        return self._job.all_gather_object(label, value)

    def write_part(self, pieces: Mapping[int, Sequence[HeldPiece]]) -> list[dict[str, Any]] | None:
        """Writes this worker's part of a backup; returns, on the chief, what to say of all parts.

        All workers must call it. When it returns, all parts are on the disk; or, if a worker could
        not write, all workers get None.

        Args:
            pieces: What this worker holds, by the number of the variable.
        """
        assert self._job is not None
        assert self._run is not None
        rank, own, error = self._job.rank, {}, None
        try:
            own = backup_parts.write(
                self._folder, self.number, self._run, rank, pieces, mode=self._mode
            )
        except BackupError:
            raise
        except OSError as caught:
            error = str(caught)
        told = self._job.gather_object("a part of a backup", [own, error])
        failed = [f"worker {rank}: {error}" for rank, (_, error) in enumerate(told) if error]
        failed = self._job.broadcast_object("parts that were not written", failed)
        if not failed:
            return [part for part, _ in told]
        if self._job.is_chief:
            self._give_up("; ".join(failed))
        return None

    def write(self, backup: Backup) -> None:
        """Writes a backup, and removes those that are too old; warns if the disk takes none."""
        try:
            backup_file.write(self._folder, self.number, backup, self._mode)
            self._remove(self._own()[self._keep :])
        except BackupError:
            raise
        except OSError as error:
            self._give_up(error)

    def _give_up(self, why: Any) -> None:
        with contextlib.suppress(OSError):
            backup_parts.remove_orphans(self._folder, up_to=self.number)
        warn_user(
            f"Backup {self.number} could not be written to {self._folder}: {why}. Training goes "
            "on, and the next backup is written at its time. Until then a restart begins at the "
            "newest that is there."
        )

    def training_ended(self, *, removes: bool) -> None:
        """Counts a call of `fit` that has ended.

        Its backups go; under the launcher the last stays until all scripts of the job have ended.
        """
        _ENDED[self._place] += 1
        if not self._is_chiefs:
            return
        if removes:
            run, [*newest], old = _run_of_launcher(), self._own()[:1], self._own()[1:]
            with contextlib.suppress(OSError):
                if run is not None and newest:
                    (self._folder / _MARK).write_text(run, encoding="utf-8")
                    self._remove(old)
                    gone = partial(_remove_finished, self._place, run)
                    if self._job is not None:
                        self._job.at_leave(gone)
                    else:
                        atexit.register(lambda: _is_failing() or gone())
                else:
                    self._remove([*newest, *old])
        folder_lock.release(self._folder)

    def _remove(self, paths: Sequence[Path]) -> None:
        """Removes backups: a backup without its parts must not be found."""
        backup_file.remove(paths)
        backup_parts.remove_orphans(self._folder, up_to=self.number)

    def _all(self) -> list[Path]:
        return backup_file.newest_first(self._folder)

    def _own(self) -> list[Path]:
        return [path for path in self._all() if path not in self._of_later_calls]


def _is_failing() -> bool:
    """Returns whether this process ends by an error."""
    return getattr(sys, "last_value", None) is not None


def _run_of_launcher() -> str | None:
    """Returns a name that this run of ``kerasdist run`` has in all its attempts."""
    if kerasdist_variables.RESTART not in os.environ:
        return None
    return os.environ.get(JOB_ID, "").rpartition("-")[0] or None


def _mark_of(folder: Path) -> str | None:
    """Returns the run whose call has ended, and left its last backup."""
    try:
        return (folder / _MARK).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _remove_finished(folder: Path, run: str) -> None:
    """Removes what a call has left that has ended, unless another run has done so."""
    with contextlib.suppress(OSError):
        if _mark_of(folder) == run:
            backup_file.remove(backup_file.newest_first(folder))
            backup_parts.remove_orphans(folder)
            (folder / _MARK).unlink()


def _fit_of(path: Path) -> int:
    """Returns how many calls of `fit` had ended before that of a backup; 0 if it is torn."""
    try:
        return int(StoredFile(path).facts["fit"])
    except _UNUSABLE:
        return 0


def _refuse(path: Path, reason: Any) -> None:
    warn_user(f"The backup {path} is not used: {reason}. The one before it is, if there is one.")
