"""What all workers decide or compare together as `fit` runs: when to stop, and their weights."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import final

import keras

from kerasdist import keras_compat
from kerasdist.agreement import results
from kerasdist.callbacks.backup_and_restore import BackupAndRestore
from kerasdist.callbacks.model_checkpoint import ModelCheckpoint
from kerasdist.job.job import Job
from kerasdist.training.binding import binding_of


@final
class Vote(keras.callbacks.Callback):
    """Stops training on all workers at the same step, if one of them wants to stop.

    It is the last callback. Workers vote after each batch if one of them has a user-defined
    callback that acts on batches, or may be preempted; otherwise after each epoch, since Keras's
    own callbacks decide by the logs, which are equal. With each vote they compare what is
    trainable, and as an epoch or a batch begins if a user-defined callback acts then: workers that
    train other weights would wait for each other's gradients.
    """

    def __init__(
        self,
        job: Job,
        others: Sequence[keras.callbacks.Callback],
        backups: Sequence[BackupAndRestore],
    ) -> None:
        """Makes the callback. All workers must call it."""
        super().__init__()
        self._job = job
        self._epoch = 0
        self._backups = [one for one in backups if one.listens]
        job.assert_equal(
            "callbacks", {"number of BackupAndRestore that listen": len(self._backups)}
        )
        self._variables: list[keras.Variable] = []
        own = [
            bool(self._backups) or any(map(_acts_on_batches, others)),
            any(_acts_on(one, ("on_train_begin", "on_epoch_begin")) for one in others),
            any(_acts_on(one, ("on_batch_begin", "on_train_batch_begin")) for one in others),
        ]
        everyone = job.all_gather_object("callbacks that look at batches", own)
        looks, self._compares_first, before = map(any, zip(*everyone, strict=True))
        # Set on the instance: Keras runs callbacks in another thread if none acts on batches.
        if looks:
            self.on_train_batch_end = self._after_batch
        if before:
            self.on_train_batch_begin = self._before_batch

    def on_epoch_begin(self, epoch: int, logs: dict[str, object] | None = None) -> None:
        """Remembers the number of the epoch, and what is trainable."""
        del logs
        self._epoch = epoch
        self._variables = keras_compat.model_of(self).variables
        if self._compares_first:
            self._gather(f"beginning of epoch {epoch + 1}", [])

    def on_epoch_end(self, epoch: int, logs: dict[str, object] | None = None) -> None:
        """Votes. All workers must call it."""
        del logs
        self._vote(f"end of epoch {epoch + 1}", epoch + 1, 0)

    def _before_batch(self, batch: int, logs: dict[str, object] | None = None) -> None:
        del logs
        self._gather(f"beginning of batch {batch + 1} of epoch {self._epoch + 1}", [])

    def _after_batch(self, batch: int, logs: dict[str, object] | None = None) -> None:
        del logs
        self._vote(f"end of batch {batch + 1} of epoch {self._epoch + 1}", self._epoch, batch + 1)

    def _vote(self, label: str, epoch: int, batches: int) -> None:
        model = keras_compat.model_of(self)
        asked = [backup.asked_to_leave for backup in self._backups]
        votes = self._gather(label, [bool(model.stop_training), *asked])
        stop, *leave = map(any, zip(*votes, strict=True))
        for backup, leaves in zip(self._backups, leave, strict=True):
            if leaves:
                backup.leave(epoch, batches)
        if stop:
            model.stop_training = True

    def _gather(self, label: str, own: list[bool]) -> list[list[bool]]:
        """Returns the votes of all workers, which must have the same trainable weights."""
        flags = zlib.crc32(bytes(bool(one.trainable) for one in self._variables))
        everyone = self._job.all_gather_object(label, [flags, *own])
        if any(theirs != flags for theirs, *_ in everyone):
            self._job.assert_equal(
                f"trainable weights at the {label}",
                {
                    f"variable {number} {results.unnumbered(one.path)}": bool(one.trainable)
                    for number, one in enumerate(self._variables)
                },
                "Something has set `trainable` on some workers alone, such as a callback. Do the "
                "same on all workers.",
            )
        return [votes for _, *votes in everyone]


def _acts_on(callback: keras.callbacks.Callback, events: tuple[str, ...]) -> bool:
    own = keras_compat.is_builtin(type(callback)) and type(callback).__name__ != "LambdaCallback"
    return not own and keras_compat.overrides(callback, events)


def _acts_on_batches(callback: keras.callbacks.Callback) -> bool:
    own = keras_compat.is_builtin(type(callback)) or isinstance(callback, ModelCheckpoint)
    return not own and keras_compat.overrides(callback, keras_compat.TRAIN_BATCH_EVENTS)


@final
class InSync(keras.callbacks.Callback):
    """Compares the weights of all workers at the end of each epoch, by a checksum.

    It compares the sizes of the batches too. It runs after the callbacks that may change weights,
    and before those that back them up.
    """

    def on_train_begin(self, logs: dict[str, object] | None = None) -> None:
        """Forgets the batches before this call."""
        del logs
        binding = binding_of(keras_compat.model_of(self))
        if binding is not None and binding.replicas.job is not None:
            history = binding.replicas.batch_history
            history.clear()
            binding.replicas.job.report_batches(history.report)

    def on_epoch_end(self, epoch: int, logs: dict[str, object] | None = None) -> None:
        """Compares batches and weights. All workers must call it."""
        del logs
        binding, when = binding_of(keras_compat.model_of(self)), f"the end of epoch {epoch + 1}"
        if binding is not None:
            binding.replicas.first_batches.require_equal_since(when)
            if binding.replicas.job is not None:
                binding.replicas.job.compare_collectives(when)
            results.require_equal_weights(self.model, binding.replicas, when)
