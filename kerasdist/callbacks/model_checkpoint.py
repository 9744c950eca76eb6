"""ModelCheckpoint that can write its files in a thread while training continues."""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, final

import keras

from kerasdist import keras_compat
from kerasdist.backends.base.model_trainer import replicas_of
from kerasdist.core.user_warnings import warn_user


@final
class ModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras's ModelCheckpoint, which can also write its files in the background.

    With ``save="async"`` training stops only while the model's state is copied to the memory of the
    host. A thread then writes the file that ``model.save`` or ``model.save_weights`` would have
    written at that moment. The thread writes under a temporary name first, so that a file
    with the final name is always complete. One file is written at a time: if a save is due while a
    file is being written, training waits for that file. So there is never more than one copy of the
    state. The memory for this copy is kept until `fit` ends.

    If the thread fails, for example because the disk is full, `fit` raises the error: after the
    next batch, at the end of an epoch, in the next save, or at the end of training, whichever comes
    first.
    Neither `fit` nor the process ends before the last file is written. If `fit` ends with an error,
    `fit` waits for the file only if the model was made in a strategy's scope. For other models call
    `wait`.

    In a job of several workers the chief writes; the other workers wait for the chief at the end of
    training.

    With ``verbose=1``, Keras's message "finished saving" appears when the state has been copied,
    not when the file is written.

    Example::

        checkpoint = kd.callbacks.ModelCheckpoint("best.keras", save_best_only=True, save="async")
        model.fit(x, y, validation_split=0.1, callbacks=[checkpoint])

    Source: ``keras.callbacks.ModelCheckpoint``.
    """

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        *arguments: Any,
        save: Literal["sync", "async"] = "sync",
        **options: Any,
    ) -> None:
        """Makes the callback.

        Args:
            filepath: The file; with ``save="async"`` its name must end in ``.keras`` or
                ``.weights.h5``.
            *arguments: Positional arguments of Keras's callback: `monitor`, `verbose`,
                `save_best_only`, ...
            save: ``"sync"``: training waits for each file, as in Keras. ``"async"``: files are
                written in the background.
            **options: Keyword arguments of Keras's callback.

        Raises:
            ValueError: If an argument has an invalid value.
        """
        super().__init__(filepath, *arguments, **options)
        if save not in ("sync", "async"):
            raise ValueError(f"Expected save to be 'sync' or 'async'. Received: {save=}.")
        if save == "async" and not self.filepath.endswith((".keras", ".weights.h5")):
            raise ValueError(
                "Expected a file that ends in .keras or .weights.h5. Received: "
                f"{filepath=}, {save=}. Other files can be written with save='sync'."
            )
        gone = keras_compat.why_no_snapshots() if save == "async" else None
        if gone is not None:
            warn_user(f"ModelCheckpoint saves at once, and training waits for each file. {gone}")
        self.is_async = save == "async" and gone is None
        self._file = BackgroundFile()
        self._newest: str | None = None

    def set_model(self, model: keras.Model) -> None:
        """Stores the model; with ``save="async"``, in a wrapper that saves in the background."""
        saves = functools.partial(self._begin, model)
        super().set_model(SavingModel(model, saves) if self.is_async else model)

    def on_train_begin(self, logs: dict[str, object] | None = None) -> None:
        """Forgets the name of the last file that an earlier call of `fit` has written."""
        super().on_train_begin(logs)
        self._newest = None

    def on_train_batch_end(self, batch: int, logs: dict[str, object] | None = None) -> None:
        """Saves the model if a save is due."""
        self._file.check()
        super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, object] | None = None) -> None:
        """Saves the model if a save is due."""
        self._file.check()
        super().on_epoch_end(epoch, logs)

    def on_train_end(self, logs: dict[str, object] | None = None) -> None:
        """Waits until the last file is written; in a job, all workers wait."""
        super().on_train_end(logs)
        replicas = None if self._newest is None else replicas_of(keras_compat.model_of(self).saved)
        if replicas is None or replicas.job is None:
            self.wait()
        elif replicas.job.is_chief:
            replicas.job.write_for_all(self.wait, str(self._newest))
        else:
            replicas.job.is_written_by_chief(str(self._newest))
        self._file.memory.clear()

    def wait(self) -> None:
        """Waits until all files are written; raises the thread's error if writing has failed."""
        self._file.wait()

    def settle(self) -> None:
        """Waits until all files are written; warns if writing has failed."""
        self._file.settle()

    def _begin(self, model: Any, save: Callable[..., None], path: str, **options: object) -> None:
        name = save.__name__
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise ValueError(
                f"Expected a model that is saved by keras.Model.{name}. Received: a model of the "
                f"class {type(model).__name__}, which overrides {name}; that code cannot run while "
                "training goes on. Use save='sync'."
            )
        self.wait()
        self._newest = str(path)
        replicas = replicas_of(model)
        writes = replicas is None or replicas.job is None or replicas.job.is_chief
        if writes or (replicas is not None and replicas.reads_need_all_workers):
            snapshot = keras_compat.Snapshot(
                model, self._file.memory, weights_only=self.save_weights_only
            )
            if writes:
                self._file.write(snapshot, self._newest)
            else:
                snapshot.discard()


@final
class BackgroundFile:
    """A file that a thread writes.

    Attributes:
        memory: The arrays into which the state for the next file is copied.
    """

    def __init__(self) -> None:
        self.memory = keras_compat.Memory(list)
        self._writing: Future[None] | None = None

    def write(self, snapshot: keras_compat.Snapshot, path: str) -> None:
        """Starts to write a file; `wait` must have been called before."""
        # At exit, Python waits for the thread. Then it calls `settle`, which warns of a failure.
        atexit.register(self.settle)
        threads = ThreadPoolExecutor(1, "kerasdist-checkpoint")
        self._writing = threads.submit(snapshot.write, path)
        threads.shutdown(wait=False)

    def wait(self) -> None:
        """Waits until the file is written; raises the thread's error if writing has failed."""
        failed = self._outcome()
        if failed is not None:
            failed.add_note("kerasdist.callbacks.ModelCheckpoint was writing in the background.")
            raise failed

    def check(self) -> None:
        """Raises the thread's error if writing has failed; does not wait for the thread."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def settle(self) -> None:
        """Waits until the file is written; warns if writing has failed."""
        failed = self._outcome()
        self.memory.clear()
        if failed is not None:
            warn_user(f"ModelCheckpoint has not written a file in the background: {failed!r}.")

    def state_dict(self) -> None:
        """Returns nothing, because backups need no state of this object."""

    def load_state_dict(self, state: None) -> None:
        """Does nothing, because `state_dict` returns no state."""

    def _outcome(self) -> BaseException | None:
        if self._writing is None:
            return None
        # Waits for the thread. If Ctrl-C interrupts the wait, the next call waits again.
        failed = self._writing.exception()
        self._writing = None
        atexit.unregister(self.settle)
        return failed


# The methods of a model that write files.
_SAVES = ("save", "save_weights")


@final
class SavingModel:
    """A stand-in for the model in Keras's ModelCheckpoint; its save methods call a function.

    Attributes:
        saved: The original model.
    """

    def __init__(self, model: Any, save: Callable[..., None]) -> None:
        """Stores the model, and the function to call instead of the model's save methods.

        The function `save` is called with the model's own save method, followed by the arguments
        that Keras has passed.
        """
        self.saved = model
        self._save = save

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.saved, name)
        return functools.partial(self._save, found) if name in _SAVES else found
