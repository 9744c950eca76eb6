"""The backup files of one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from kerasdist.backends.pieces import HeldPiece
from kerasdist.callbacks import backup_file, backup_parts, training_state
from kerasdist.callbacks.backup_file import Backup, StoredFile
from kerasdist.callbacks.backup_parts import StoredVariables
from kerasdist.errors import BackupError
from kerasdist.job.job import Job
from kerasdist.user_warnings import warn_user

# How many calls of `fit` of this process have ended, by folder.
_ENDED: Counter[Path] = Counter()

_UNUSABLE = (BackupError, KeyError, OSError, TypeError, ValueError)


@final
class RunFiles:
    """Finds the newest backup of a run, writes new ones, and removes old ones.

    A script may call `fit` twice with one folder. If it is restarted during the second call, the
    first call must not touch the second one's backups.

    Attributes:
        number: The number of the newest backup.
        fit: How many calls of `fit` with this folder have ended before in this process.
        in_parts: Whether each worker writes what it holds of the divided variables.
    """

    def __init__(
        self, folder: Path, keep: int, job: Job | None = None, run: str | None = None
    ) -> None:
        """Looks into the folder.

        Args:
            folder: The folder of the run's backups.
            keep: How many backups stay.
            job: The job of this process.
            run: A name that no other run has, if all workers see the folder and divide variables.
        """
        self._folder = folder
        self._keep = keep
        self._job = job
        self._run = run
        self._place = folder.resolve()
        self._of_later_calls: set[Path] = set()
        self.in_parts = run is not None
        self.fit = _ENDED[self._place]
        self.number = max(map(backup_file.number_of, self._all()), default=0)

    def newest(self, forms: Mapping[str, Any]) -> StoredVariables | None:
        """Returns the newest backup that is complete and fits, None if there is none.

        It prints which backups it refuses, and why. All workers must call it; where they do not
        see the chief's folder, only the chief gets a backup.
        """
        if self._job is None or self._job.is_chief:
            backup_file.remove_unfinished(self._folder)
            backup_parts.remove_orphans(self._folder)
            found = self._first_whole(self._fitting(forms))
            if found is None and self._of_later_calls:
                warn_user(
                    f"The backups in {self._folder} are of a later call of fit of this script, "
                    "for which they stay: this call trains again. Give each call of fit a folder "
                    "of its own, and the first one delete_checkpoint=False, so that it need not."
                )
            return found
        return self._first_whole(iter(())) if self.in_parts else None

    def _fitting(self, forms: Mapping[str, Any]) -> Iterator[StoredFile]:
        """Yields the chief's files of backups of this model, newest first."""
        self._of_later_calls = {path for path in self._all() if _fit_of(path) > self.fit}
        for path in self._own():
            try:
                stored = backup_file.read(path)
                training_state.require_same(forms, stored.facts["forms"])
            except _UNUSABLE as error:
                _refuse(path, error)
            else:
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

    def write_part(self, pieces: Mapping[int, Sequence[HeldPiece]]) -> list[dict[str, Any]]:
        """Writes this worker's part of a backup; returns what is to be said of all parts.

        All workers must call it. When it returns, all parts are on the disk.

        Args:
            pieces: What this worker holds, by the number of the variable.
        """
        assert self._job is not None
        assert self._run is not None
        own = backup_parts.write(self._folder, self.number, self._run, self._job.rank, pieces)
        return self._job.all_gather_object("a part of a backup", own)

    def write(self, backup: Backup) -> None:
        """Writes a backup, and removes those that are too old."""
        backup_file.write(self._folder, self.number, backup)
        self._remove(self._own()[self._keep :])

    def training_ended(self, *, removes: bool) -> None:
        """Counts a call of `fit` that has ended."""
        _ENDED[self._place] += 1
        if removes:
            self._remove(self._own())

    def _remove(self, paths: Sequence[Path]) -> None:
        """Removes backups: a backup without its parts must not be found."""
        backup_file.remove(paths)
        backup_parts.remove_orphans(self._folder, up_to=self.number)

    def _all(self) -> list[Path]:
        return backup_file.newest_first(self._folder)

    def _own(self) -> list[Path]:
        return [path for path in self._all() if path not in self._of_later_calls]


def _fit_of(path: Path) -> int:
    """Returns how many calls of `fit` had ended before that of a backup; 0 if it is torn."""
    try:
        return int(StoredFile(path).facts["fit"])
    except _UNUSABLE:
        return 0


def _refuse(path: Path, reason: Any) -> None:
    warn_user(f"The backup {path} is not used: {reason}. The one before it is, if there is one.")
