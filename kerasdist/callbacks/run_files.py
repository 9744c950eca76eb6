"""The backup files of one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from kerasdist.callbacks import backup_file, training_state
from kerasdist.callbacks.backup_file import Backup
from kerasdist.errors import BackupError
from kerasdist.user_warnings import warn_user

# How many calls of `fit` of this process have ended, by folder.
_ENDED: Counter[Path] = Counter()


@final
class RunFiles:
    """Finds the newest backup of a run, writes new ones, and removes old ones.

    A script may call `fit` twice with one folder. If it is restarted during the second call, the
    first call must not touch the second one's backups.

    Attributes:
        number: The number of the newest backup.
        fit: How many calls of `fit` with this folder have ended before in this process.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self._place = folder.resolve()
        self._of_later_calls: set[Path] = set()
        self.fit = _ENDED[self._place]
        self.number = max(map(backup_file.number_of, self._all()), default=0)

    def newest(self, forms: Mapping[str, Any]) -> Backup | None:
        """Returns the newest backup that is complete and fits, None if there is none.

        It prints which backups it refuses, and why.
        """
        backup_file.remove_unfinished(self._folder)
        found = None
        for path in self._all():
            try:
                backup = backup_file.read(path)
                if backup.facts["fit"] > self.fit:
                    self._of_later_calls.add(path)
                elif found is None:
                    training_state.require_same(forms, backup.facts["forms"])
                    found = backup
            except (BackupError, KeyError, ValueError) as error:
                if found is None:
                    warn_user(
                        f"The backup {path} is not used: {error}. The one before it is, if there "
                        "is one."
                    )
        if found is None and self._of_later_calls:
            warn_user(
                f"The backups in {self._folder} are of a later call of fit of this script, for "
                "which they stay: this call trains again. Give each call of fit a folder of its "
                "own, and the first one delete_checkpoint=False, so that it need not."
            )
        return found

    def write(self, backup: Backup) -> None:
        """Writes a backup, and removes those that are too old."""
        backup_file.write(self._folder, self.number, backup)
        backup_file.remove(self._own()[self._keep :])

    def training_ended(self, *, removes: bool) -> None:
        """Counts a call of `fit` that has ended."""
        _ENDED[self._place] += 1
        if removes:
            backup_file.remove(self._own())

    def _all(self) -> list[Path]:
        return backup_file.newest_first(self._folder)

    def _own(self) -> list[Path]:
        return [path for path in self._all() if path not in self._of_later_calls]
