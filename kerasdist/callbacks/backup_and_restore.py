"""Backups of a training run, from which a new process goes on."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, final

import keras

from kerasdist import keras_seam
from kerasdist.callbacks import backup_file, training_state
from kerasdist.callbacks.backup_file import Backup
from kerasdist.callbacks.broadcast import broadcast
from kerasdist.callbacks.in_sync import require_equal_weights
from kerasdist.errors import BackupError
from kerasdist.job.current import current
from kerasdist.job.exit_codes import ExitCode


@final
class BackupAndRestore(keras.callbacks.Callback):
    """Backs up a training run, and lets `fit` go on from there when the script is started again.

    The run that was interrupted ends with the numbers of the run that was not. A backup holds the
    weights, the optimizer's state, the metrics, the seeds and the states of the random generators,
    the epoch and the batch, and what the other callbacks remember as far as it is numbers and
    lists (EarlyStopping's patience, ReduceLROnPlateau's, the history; not EarlyStopping's best
    weights). A run that goes on reads again, without computing, the batches of the epoch that it
    has seen; other callbacks hear nothing of them.

    The chief writes, whole files only: each is written under another name, then renamed. It reads
    the newest that is whole and of this model, says which it refuses and why, and sends the values
    to the other workers. `fit` calls this callback after all others, wherever it stands.

    On TensorFlow an order of the data that is shuffled repeats only if the script sets the seed
    (``keras.utils.set_random_seed``).

    Source: ``keras.callbacks.BackupAndRestore``, whose arguments these are.
    """

    def __init__(
        self,
        backup_dir: str | Path,
        save_freq: Literal["epoch"] | int = "epoch",
        *,
        keep: int = 2,
        delete_checkpoint: bool = True,
    ) -> None:
        """Makes the callback.

        Args:
            backup_dir: The folder of the backups, for this run alone; the chief's machine needs it.
            save_freq: ``"epoch"``: at the end of each epoch. A number: also after so many batches
                of an epoch, and every so many after that.
            keep: How many backups stay, at least 1. With 2 there is one left if the last is torn.
            delete_checkpoint: Whether the backups go when training ends as it should.

        Raises:
            ValueError: If an argument has no meaning.
        """
        super().__init__()
        if not str(backup_dir):
            raise ValueError("Expected a folder. Received: backup_dir=''.")
        if save_freq != "epoch" and not (isinstance(save_freq, int) and save_freq > 0):
            raise ValueError(
                "Expected save_freq to be 'epoch' or a positive number of batches. Received: "
                f"{save_freq=}."
            )
        if keep < 1:
            raise ValueError(f"Expected to keep at least one backup. Received: {keep=}.")
        self.backup_dir = Path(backup_dir)
        self.save_freq = save_freq
        self._keep = keep
        self._delete = delete_checkpoint
        self._others: Sequence[Any] = ()
        self._listed: Sequence[Any] = ()
        self._unmute = contextlib.ExitStack()
        self._number = 0
        self._epoch = 0
        self._random_states: dict[str, Any] = {}
        self._resumed: dict[str, Any] | None = None
        self._resumed_values: Backup | None = None
        self._skipped = 0
        self._last_saved = 0
        self._listens = self._asked = self._in_training = False

    @property
    def listens(self) -> bool:
        """Whether this process may be asked to leave; see `kerasdist.experimental.preempt`."""
        return self._listens

    @property
    def asked_to_leave(self) -> bool:
        """Whether it was."""
        return self._asked

    def listen(self) -> None:
        """Notes that this process may be asked to leave."""
        self._listens = True

    def ask_to_leave(self) -> bool:
        """Asks for a backup after the next batch, and the end of the script.

        Returns:
            Whether that will happen: not outside of training, and not if it was asked before.
        """
        heard, self._asked = self._in_training and not self._asked, True
        return heard

    def leave(self, epoch: int, batches: int) -> NoReturn:
        """Backs up and ends the script. All workers must call it.

        Args:
            epoch: The epoch in which a run is to go on.
            batches: How many of its batches have passed.

        Raises:
            SystemExit: With the exit code for it.
        """
        self.save(epoch, batches)
        raise SystemExit(ExitCode.PREEMPTED)

    def beside(self, others: Sequence[Any], listed: Sequence[Any]) -> None:
        """Notes the other callbacks of the call, to keep what they remember.

        Args:
            others: The callbacks, as the user gave them.
            listed: The same, as Keras calls them.
        """
        self._others, self._listed = others, listed

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restores the newest backup that fits. All workers must call it.

        Raises:
            BackupError: If the model is not built.
        """
        del logs
        self._in_training = True
        model: Any = self.model
        if not model.built:
            raise BackupError(
                "Expected a model that is built, to restore its variables. Received: "
                f"model={model.name!r}, not built. Give it an Input layer, or call it once."
            )
        job = current()
        variables = training_state.variables_of(self.model)
        found = None
        if job is None or job.is_chief:
            backup_file.remove_unfinished(self.backup_dir)
            found = self._newest(variables)
        facts = None if found is None else dict(found.facts)
        if job is not None:
            facts = job.exchange("backup", facts)[0]
        self._resumed, self._resumed_values = facts, None
        self._number, self._skipped = 0, 0
        if facts is None:
            return
        self._number = facts["number"]
        if found is not None:
            training_state.put_back(variables, found)
        broadcast(self.model)
        self._resumed_values = Backup({}, training_state.values(variables))
        keras_seam.set_initial_epoch(self.model, facts["epoch"])

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Puts back what an epoch's begin has reset, where a run goes on.

        Args:
            epoch: The epoch.
            logs: Not used.
        """
        del logs
        self._epoch, self._last_saved, self._skipped = epoch, 0, 0
        if self._resumed is not None:
            self._go_on(self._resumed)
            self._resumed = self._resumed_values = None
        self._random_states = training_state.random_states()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Backs up, if so many batches have passed.

        Args:
            batch: The batch's number in the epoch.
            logs: Not used.
        """
        del logs
        done = batch + 1
        if done == self._skipped:
            self._unmute.close()
        if done <= self._skipped:
            return
        if self._asked and current() is None:  # with other workers, they vote on it
            self.leave(self._epoch, done)
        if isinstance(self.save_freq, str):
            return
        if done // self.save_freq > self._last_saved // self.save_freq:
            self.save(self._epoch, done)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Backs up.

        Args:
            epoch: The epoch.
            logs: Not used.
        """
        del logs
        if self._asked and current() is None:
            self.leave(epoch + 1, 0)
        self.save(epoch + 1, 0)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Removes the backups, if they are not needed any more."""
        del logs
        self._in_training = False
        self._unmute.close()
        keras_seam.set_initial_epoch(self.model, None)
        job = current()
        if self._delete and (job is None or job.is_chief):
            backup_file.remove(backup_file.newest_first(self.backup_dir))

    def save(self, epoch: int, batches: int) -> None:
        """Writes a backup. All workers must call it; the chief writes.

        Args:
            epoch: The epoch in which a run is to go on.
            batches: How many of its batches have passed.

        Raises:
            DisagreementError: If workers have other weights.
        """
        self._last_saved = batches
        self._number += 1
        if batches:  # at the end of an epoch they are known to be equal
            require_equal_weights(self.model, f"batch {batches} of epoch {epoch + 1}")
        variables = training_state.variables_of(self.model)
        arrays = training_state.values(variables)
        if batches:
            training_state.add_up_anew(variables, arrays)
        job = current()
        if job is not None and not job.is_chief:
            return
        now = training_state.random_states()
        facts = {
            "number": self._number,
            "epoch": epoch,
            "batches": batches,
            "keras": keras.__version__,
            "forms": training_state.forms(self.model, variables),
            # The order of an epoch's data is drawn as it begins, masks of dropout all the time.
            "random at epoch begin": self._random_states if batches else now,
            "random": now,
            "callbacks": [
                [type(one).__name__, training_state.plain_state(one)] for one in self._remembering()
            ],
        }
        backup_file.write(self.backup_dir, self._number, Backup(facts, arrays))
        backup_file.remove(backup_file.newest_first(self.backup_dir)[self._keep :])

    def _newest(self, variables: Sequence[Any]) -> Backup | None:
        for path in backup_file.newest_first(self.backup_dir):
            try:
                backup = backup_file.read(path)
                own = training_state.forms(self.model, variables)
                training_state.require_same(own, backup.facts["forms"])
            except (BackupError, KeyError, ValueError) as error:
                warnings.warn(
                    f"The backup {path} is not used: {error}. The one before it is, if there is "
                    "one.",
                    stacklevel=2,
                )
                # Later backups must be newer than this one, too.
                self._number = max(self._number, backup_file.number_of(path))
            else:
                return backup
        return None

    def _go_on(self, facts: dict[str, Any]) -> None:
        assert self._resumed_values is not None
        model: Any = self.model
        training_state.put_back(training_state.variables_of(model), self._resumed_values)
        if not facts["batches"]:
            model.reset_metrics()  # what was kept is the last epoch's
        training_state.set_random_states(facts["random at epoch begin"])
        remembered = list(facts["callbacks"])
        for callback in self._remembering():
            kept = next((one for one in remembered if one[0] == type(callback).__name__), None)
            if kept is not None:
                remembered.remove(kept)
                training_state.set_plain_state(callback, kept[1])
        self._skipped = self._last_saved = facts["batches"]
        if self._skipped:
            for callback in self._listed:
                self._unmute.enter_context(_hearing_nothing_of_batches(callback))
            go_on = functools.partial(training_state.set_random_states, facts["random"])
            keras_seam.skip_batches(self.model, self._skipped, go_on)

    def _remembering(self) -> list[Any]:
        model: Any = self.model
        kept = [one for one in self._others if one is not model.history]
        return [*kept, model.history]


@contextlib.contextmanager
def _hearing_nothing_of_batches(callback: Any) -> Iterator[None]:
    """Keeps from a callback what it has heard before the backup."""
    kept = dict(vars(callback))
    vars(callback).update(on_train_batch_begin=_nothing, on_train_batch_end=_nothing)
    try:
        yield
    finally:
        for name in ("on_train_batch_begin", "on_train_batch_end"):
            del vars(callback)[name]
            vars(callback).update({name: kept[name]} if name in kept else {})


def _nothing(batch: int, logs: Any = None) -> None:
    del batch, logs
