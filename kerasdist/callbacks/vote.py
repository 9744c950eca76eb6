"""A common decision of all workers to stop training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import keras

from kerasdist import keras_compat
from kerasdist.callbacks.backup_and_restore import BackupAndRestore
from kerasdist.callbacks.model_checkpoint import ModelCheckpoint
from kerasdist.job.job import Job


@final
class Vote(keras.callbacks.Callback):
    """Stops training on all workers at the same step, if one of them wants to stop.

    It is the last callback. Workers vote after each batch if one of them has a user-defined
    callback that acts on batches, or may be preempted; otherwise after each epoch, since Keras's
    own callbacks decide by the logs, which are equal.
    """

    def __init__(
        self, job: Job, others: Sequence[Any], backups: Sequence[BackupAndRestore]
    ) -> None:
        """Makes the callback. All workers must call it."""
        super().__init__()
        self._job = job
        self._epoch = 0
        self._backups = [one for one in backups if one.listens]
        job.assert_equal(
            "callbacks", {"number of BackupAndRestore that listen": len(self._backups)}
        )
        looks = bool(self._backups) or any(map(_acts_on_batches, others))
        if any(job.all_gather_object("callbacks that look at batches", looks)):
            # Set on the instance: Keras runs callbacks in another thread if none acts on batches.
            self.on_train_batch_end = self._after_batch

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Remembers the number of the epoch."""
        del logs
        self._epoch = epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Votes. All workers must call it."""
        del logs
        self._vote(f"end of epoch {epoch + 1}", epoch + 1, 0)

    def _after_batch(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        del logs
        self._vote(f"end of batch {batch + 1} of epoch {self._epoch + 1}", self._epoch, batch + 1)

    def _vote(self, label: str, epoch: int, batches: int) -> None:
        model = keras_compat.model_of(self)
        asked = [backup.asked_to_leave for backup in self._backups]
        votes = self._job.all_gather_object(label, [bool(model.stop_training), *asked])
        stop, *leave = map(any, zip(*votes, strict=True))
        for backup, leaves in zip(self._backups, leave, strict=True):
            if leaves:
                backup.leave(epoch, batches)
        if stop:
            model.stop_training = True


def _acts_on_batches(callback: Any) -> bool:
    own = keras_compat.is_builtin(type(callback)) or isinstance(callback, ModelCheckpoint)
    return not own and keras_compat.overrides(callback, keras_compat.TRAIN_BATCH_EVENTS)
