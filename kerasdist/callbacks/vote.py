"""Callbacks by which workers agree when to stop `fit`, and compare their weights."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import final

import keras
from keras.callbacks import Callback

from kerasdist import keras_compat
from kerasdist.agreement import results
from kerasdist.backends.base import random_states
from kerasdist.backends.base.interface import ReplicaSet
from kerasdist.callbacks.backup_and_restore import BackupAndRestore
from kerasdist.callbacks.model_checkpoint import ModelCheckpoint
from kerasdist.errors import DisagreementError
from kerasdist.job.job import Job

_TRAINABLE = "trainable weights"
_ADVICE = (
    "Something has set `trainable` on some workers alone, such as a callback. Do the same on all "
    "workers."
)


@final
class Vote(Callback):
    """Stops training on all workers at the same step if one of them wants to stop.

    Vote is the last callback. Workers vote after each epoch. They also vote after a batch if a
    worker asks for a vote. Workers can ask only in two cases: one of them has a user-defined
    callback that acts on batches, or a worker may be preempted. Keras's own callbacks need no vote,
    because they decide by the logs, which are equal on all workers. If all workers want to stop,
    they stop at once. If only some want to stop, all workers stop after the next batch, because a
    worker may already have begun that batch.

    With each vote the workers compare which variables are trainable. They also compare this when an
    epoch begins, if a user-defined callback acts at that time. Without this comparison, workers
    that train different weights would wait forever for each other's gradients.
    """

    def __init__(
        self, job: Job, others: Sequence[Callback], backups: Sequence[BackupAndRestore]
    ) -> None:
        """Makes the callback. All workers must call this method."""
        super().__init__()
        self._job = job
        self._epoch = 0
        self._wanted_to_stop = False  # whether a worker wanted to stop after an earlier batch
        self._backups = [one for one in backups if one.listens]
        job.assert_equal(
            "callbacks", {"number of BackupAndRestore that listen": len(self._backups)}
        )
        self._variables: list[keras.Variable] = []
        self._compared: list[bool] = []  # which variables were trainable at the last comparison
        own = [
            bool(self._backups)
            or any(_acts_on(one, keras_compat.TRAIN_BATCH_EVENTS) for one in others),
            any(_acts_on(one, ("on_train_begin", "on_epoch_begin")) for one in others),
            any(_acts_on(one, ("on_batch_begin", "on_train_batch_begin")) for one in others),
        ]
        everyone = job.all_gather_object("callbacks that look at batches", own)
        looks, self._compares_first, before = map(any, zip(*everyone, strict=True))
        # The methods are set only if needed, because Keras can run callbacks in another thread only
        # if none of them has methods for batches.
        if looks:
            self.on_train_batch_end = self._after_batch
        if before:
            self.on_train_batch_begin = self._before_batch

    def on_epoch_begin(self, epoch: int, logs: dict[str, object] | None = None) -> None:
        """Stores the number of the epoch, and the model's variables.

        If a user-defined callback acts when `fit` or an epoch begins, the workers compare here
        which variables are trainable.
        """
        self._epoch = epoch
        self._variables = keras_compat.model_of(self).variables
        if self._compares_first:
            self._gather(f"beginning of epoch {epoch + 1}", [])

    def on_epoch_end(self, epoch: int, logs: dict[str, object] | None = None) -> None:
        """Votes. All workers must call this method."""
        wants = keras_compat.model_of(self).stop_training or self._wanted_to_stop
        # A worker may have asked for a vote after a batch. This call of `meets_here` answers the
        # request; its result is not used, because all workers vote here in any case.
        self._job.meets_here(wants=False)
        stops, *_ = self._vote(f"end of epoch {epoch + 1}", [wants], epoch + 1, 0)
        keras_compat.model_of(self).stop_training = any(stops)

    def _before_batch(self, batch: int, logs: dict[str, object] | None = None) -> None:
        label = f"beginning of batch {batch + 1} of epoch {self._epoch + 1}"
        if self._meets(label):
            self._gather(label, [])

    def _after_batch(self, batch: int, logs: dict[str, object] | None = None) -> None:
        model = keras_compat.model_of(self)
        wants, wanted = bool(model.stop_training), self._wanted_to_stop
        self._wanted_to_stop = wants or wanted
        # The attribute is set only if it must change, because setting an attribute of a Keras model
        # takes as long as a small operation.
        if wants:
            model.stop_training = False
        label = f"end of batch {batch + 1} of epoch {self._epoch + 1}"
        asks = any(backup.asked_to_leave for backup in self._backups)
        if self._meets(label, wants=wants or wanted or asks):
            now, before = self._vote(label, [wants, wanted], self._epoch, batch + 1)
            model.stop_training = all(now) or any(before)
            self._wanted_to_stop = any(now)

    def _meets(self, label: str, *, wants: bool = False) -> bool:
        """Returns whether all workers vote here, because one of them has asked for a vote.

        A worker asks if it `wants` to vote, or if the set of its trainable variables has changed.
        If this set has changed but the workers do not vote here, the method raises an error,
        because another worker has already passed this point and trains on.
        """
        before, now = self._compared, self._trainable()
        meets = self._job.meets_here(wants or now != before)
        if now != before and not meets:
            named = zip_longest(self._named().items(), before)
            changed = (one for one, was in named if one is not None and one[1] != was)
            name, value = next(changed, ("number of variables", len(now)))
            raise DisagreementError(
                f"{self._job.who} Expected all workers to have the same {_TRAINABLE} at the "
                f"{label}. Received: {name}={value} on this worker, while others train on. "
                f"{_ADVICE}"
            )
        return meets

    def _vote(
        self, label: str, own: list[bool], epoch: int, batches: int
    ) -> list[tuple[bool, ...]]:
        """Returns, for each item of `own`, the values of all workers.

        If a worker is preempted, this method does not return: all workers save a backup and end the
        script. All workers must call this method.
        """
        asked = [backup.asked_to_leave for backup in self._backups]
        everyone = list(zip(*self._gather(label, [*own, *asked]), strict=True))
        for backup, leaves in zip(self._backups, everyone[len(own) :], strict=True):
            if any(leaves):
                backup.leave(epoch, batches)
        return everyone[: len(own)]

    def _gather(self, label: str, own: list[bool]) -> list[list[bool]]:
        """Returns the votes of all workers, after a check that all train the same weights."""
        self._compared = self._trainable()
        flags = zlib.crc32(bytes(self._compared))
        everyone = self._job.all_gather_object(label, [flags, *own])
        if any(theirs != flags for theirs, *_ in everyone):
            self._job.assert_equal(f"{_TRAINABLE} at the {label}", self._named(), _ADVICE)
        return [votes for _, *votes in everyone]

    def _trainable(self) -> list[bool]:
        return [bool(one.trainable) for one in self._variables]

    def _named(self) -> dict[str, bool]:
        paths = (results.unnumbered(one.path) for one in self._variables)
        names = (f"variable {number} {path}" for number, path in enumerate(paths))
        return dict(zip(names, self._trainable(), strict=True))


def _acts_on(callback: Callback, events: tuple[str, ...]) -> bool:
    """Returns whether a callback has user code that runs at one of these events."""
    kind = type(callback)
    own = keras_compat.is_builtin(kind) and kind is not keras.callbacks.LambdaCallback
    own = own or isinstance(callback, ModelCheckpoint)
    return not own and keras_compat.overrides(callback, events)


@final
class InSync(Callback):
    """Compares the weights of all workers at the end of each epoch, by checksums.

    The callback also compares the batches and the collectives that each worker has recorded in the
    epoch. If each worker shuffles arrays by itself (`shuffles`), the callback also compares the
    states of the random generators that determine the order of the examples, because code on a
    single worker may have used these generators. This callback runs after the callbacks that may
    change weights, and before the callbacks that save backups.
    """

    def __init__(self, replicas: ReplicaSet, job: Job, *, shuffles: bool = False) -> None:
        super().__init__()
        self._replicas = replicas
        self._job = job
        self._shuffles = shuffles

    def on_train_begin(self, logs: dict[str, object] | None = None) -> None:
        """Starts a new record of the batches' shapes, which heartbeats carry to the chief."""
        self._replicas.first_batches.history.clear()
        self._job.report_batches(self._replicas.first_batches.history.report)

    def on_epoch_end(self, epoch: int, logs: dict[str, object] | None = None) -> None:
        """Compares batches, collectives and weights. All workers must call this method."""
        when = f"the end of epoch {epoch + 1}"
        self._replicas.first_batches.require_equal_since(when)
        self._job.compare_collectives(when)
        results.require_equal_weights(self.model, self._replicas, when)
        if self._shuffles:
            random_states.ensure_equal(self._job)
