"""Prepares callbacks for `fit` on many workers: those that write files run only on the chief.

On every worker the logs are computed from the global batch, so callbacks that decide by the logs
make the same decisions on all workers. But a single worker may set ``stop_training``, so the
workers vote on it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import keras
from keras.callbacks import Callback

from kerasdist import keras_compat
from kerasdist.backends.base.interface import ReplicaSet
from kerasdist.backends.base.metering import Meter
from kerasdist.callbacks.backup import fit_call
from kerasdist.callbacks.backup.position import Position
from kerasdist.callbacks.backup_and_restore import BackupAndRestore
from kerasdist.callbacks.chief_only import ChiefOnly, DelegatingCallback
from kerasdist.callbacks.horovod import LearningRateWarmup, broadcast
from kerasdist.callbacks.model_checkpoint import ModelCheckpoint, SavingModel
from kerasdist.callbacks.profile import Profile
from kerasdist.callbacks.telemetry import Bench, Progress, Telemetry
from kerasdist.callbacks.vote import InSync, Vote
from kerasdist.core import whole_files
from kerasdist.core.context import current
from kerasdist.errors import UnsupportedError
from kerasdist.input.fit_adapter import WrappedAdapter
from kerasdist.job import launcher
from kerasdist.job.job import Job
from kerasdist.keras_compat import internals

# Callbacks that change how a model is trained. If one worker has such a callback, all workers must
# have it.
CHANGE_TRAINING = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
    keras.callbacks.TerminateOnNaN,
    LearningRateWarmup,
)

_WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


def prepare(given: dict[str, Any], replicas: ReplicaSet) -> None:
    """Wraps the callbacks of a call of `fit`; adds a `Meter` for Telemetry or the launcher."""
    callbacks = given["callbacks"]
    own = keras_compat.callbacks_of(callbacks)
    listed = _ordered(own, replicas, given)
    listeners = [one for one in own if isinstance(one, Telemetry)]
    channel, profiled = launcher.channel(), launcher.wanted()
    is_benchmark = bool(os.environ.get(launcher.BENCH))
    if listeners or is_benchmark or (channel, profiled) != (None, None):
        meter = Meter(
            knows_data=replicas.measures_data,
            # A single replica has no collectives, so their time is known to be zero.
            knows_collectives=replicas.measures_collectives or replicas.num_replicas == 1,
            steps_ahead=replicas.steps_ahead,
        )
        given["x"] = meter.follow(given["x"])
        for listener in listeners:
            listener.measures(meter, replicas)
        if channel is not None:
            listed.insert(0, Progress(meter, channel, replicas))
        if profiled is not None:
            listed.insert(0, Profile(profiled, meter, replicas))
        listed.insert(0, meter)  # the meter comes before the callbacks that read it
        if is_benchmark:
            listed.append(Bench(meter))
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.callbacks = listed
    else:
        given["callbacks"] = listed


def positions_of(given: Mapping[str, Any]) -> tuple[Position | None, Position | None]:
    """Returns two objects that follow how far `fit` has read the training and validation data.

    Backups contain these positions. If no callback saves backups, both results are None.
    """
    callbacks = keras_compat.callbacks_of(given["callbacks"])
    backups = [one for one in callbacks if isinstance(one, BackupAndRestore)]
    if not backups:
        return None, None
    position = Position(given["x"], given["steps_per_epoch"])
    position.facts = fit_call.of_data(given)
    steps = given["validation_steps"]
    validation = Position(given["validation_data"], steps, begins_anew=True)
    for backup in backups:
        backup.reads(position, validation)
    return position, validation


@contextmanager
def in_fit(given: Mapping[str, Any]) -> Generator[None]:
    """Lets callbacks finish their files and release their folders if `fit` ends with an error.

    A callback may call `fit` again within `fit`. After such an inner call, the meter of the outer
    call measures again.
    """
    outer = current.meter
    try:
        yield
    except BaseException:
        for one in keras_compat.callbacks_of(given["callbacks"]):
            if isinstance(one, ModelCheckpoint):
                one.settle()
            elif isinstance(one, BackupAndRestore):
                one.release()
        raise
    finally:
        current.meter = outer


def _ordered(
    callbacks: Sequence[Callback], replicas: ReplicaSet, given: Mapping[str, Any]
) -> list[Callback]:
    job = replicas.job
    backups = [one for one in callbacks if isinstance(one, BackupAndRestore)]
    others = [one for one in callbacks if not isinstance(one, BackupAndRestore)]
    if backups and not any(isinstance(one, keras.callbacks.History) for one in others):
        # Keras itself would add its History after the callbacks that save backups. A backup would
        # then lack the entry of the last epoch.
        others = [*others, keras.callbacks.History()]
    listed = others if job is None else [_on_worker(one, replicas, job) for one in others]
    for backup in backups:
        backup.beside(others, listed)
    if job is None:
        return [*listed, *backups]
    shuffles = given["shuffle"] and WrappedAdapter.reads_arrays(given["x"])
    return [*listed, InSync(replicas, job, shuffles=shuffles), *backups, Vote(job, others, backups)]


def _on_worker(callback: Callback, replicas: ReplicaSet, job: Job) -> Callback:
    if replicas.divides_state:
        _require_no_read_by_chief_alone(callback)
    if isinstance(callback, _WRITERS):
        return ChiefOnly(callback)
    if isinstance(callback, ModelCheckpoint) and callback.is_async:
        return callback
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        return _SavesOnChief(callback, replicas)
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        return _RestoresAll(callback, job)
    if keras_compat.is_orbax_checkpoint(callback):
        raise UnsupportedError(
            "Expected a callback that lets the chief alone write, in a job of several workers. "
            "Received: OrbaxCheckpoint, with which each worker writes to one folder. For Orbax's "
            "checkpoints call kerasdist.save_checkpoint(model, path) in on_epoch_end of a callback "
            'of your own, on all workers. kerasdist.callbacks.ModelCheckpoint(save="async") saves '
            "in the background, too."
        )
    return callback


def _require_no_read_by_chief_alone(callback: Callback) -> None:
    """Refuses a callback that reads weights only on the chief, if the chief holds only shards."""
    instead = None
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        instead = "kerasdist.callbacks.BackupAndRestore"
    elif isinstance(callback, keras.callbacks.TensorBoard) and (
        callback.histogram_freq or callback.embeddings_freq
    ):
        instead = "TensorBoard with histogram_freq=0 and embeddings_freq=0"
    if instead is not None:
        raise UnsupportedError(
            "Expected a callback that does not read weights on the chief alone, as the workers "
            f"divide them (sharding=). Received: {type(callback).__name__}. Use {instead}."
        )


@final
class _SavesOnChief(DelegatingCallback):
    """Lets ModelCheckpoint decide on every worker whether to save, but write only on the chief."""

    def __init__(self, inner: Callback, replicas: ReplicaSet) -> None:
        super().__init__(inner)
        self._replicas = replicas

    def model_for(self, model: object) -> object:
        if self._replicas.job is None or self._replicas.job.is_chief:
            return SavingModel(model, _replacing)
        return SavingModel(model, _aside if self._replicas.reads_need_all_workers else _not)


def _replacing(save: Callable[..., None], filepath: Any, *args: object, **kwargs: object) -> None:
    with whole_files.replacing(filepath) as unfinished:
        save(unfinished, *args, **kwargs)


def _aside(save: Callable[..., None], filepath: Any, *args: object, **kwargs: object) -> None:
    """Saves to a folder that is then deleted, to join in the collectives of the chief's save."""
    with tempfile.TemporaryDirectory() as folder:
        _replacing(save, Path(folder, Path(filepath).name), *args, **kwargs)


def _not(save: Callable[..., None], filepath: object, *args: object, **kwargs: object) -> None:
    """Saves nothing."""


@final
class _RestoresAll(DelegatingCallback):
    """Runs Keras's BackupAndRestore only on the chief; all workers get the restored values."""

    def __init__(self, inner: Callback, job: Job) -> None:
        super().__init__(inner, heard=job.is_chief)
        restore = self.on_train_begin

        def restore_all(logs: dict[str, object] | None = None) -> None:
            restore(logs)
            epoch = job.broadcast_object("restored epoch", internals.INITIAL_EPOCH.of(self.model))
            internals.INITIAL_EPOCH.set(self.model, epoch)
            broadcast(self.model)

        self.on_train_begin = restore_all
