"""Backups of a training run; a new process continues the run from the newest backup."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, final

from keras.callbacks import Callback

from kerasdist import keras_compat
from kerasdist.agreement import results
from kerasdist.backends.base import random_states
from kerasdist.backends.base.model_trainer import trainer_of
from kerasdist.callbacks.backup import fit_call, memory, storage
from kerasdist.callbacks.backup.encoding import Encoder, Remembering, decode, numbered
from kerasdist.callbacks.backup.interval import Interval
from kerasdist.callbacks.backup.position import Position
from kerasdist.callbacks.backup.run_files import RunFiles, name_of_run, release_folder
from kerasdist.callbacks.backup.variables import (
    StoredVariables,
    add_up_anew,
    all_variables_of,
    broadcast_arrays,
    build_optimizers,
    forms_of,
    numbers_of_weights,
    optimized_by,
    restore,
    shards_of,
    to_write,
    variables_of,
    with_arrays,
)
from kerasdist.callbacks.model_checkpoint import ModelCheckpoint
from kerasdist.core.backend_choice import KNOWN
from kerasdist.core.context import replaced_entries
from kerasdist.core.user_warnings import warn_user
from kerasdist.errors import BackupError, KerasdistError
from kerasdist.job import launcher
from kerasdist.job.interruption import ExitCode
from kerasdist.job.job import current_job
from kerasdist.keras_compat import internals, ops


@final
class BackupAndRestore(Callback):
    """Saves backups of a run; in a restarted script, `fit` continues from the newest backup.

    The continued run ends with the same numbers as an uninterrupted run, to the last bit. A backup
    contains the weights, the optimizer's state, the metrics, the seeds, the states of the random
    generators, the epoch, the batch and the position in the data. Attributes of other callbacks and
    of data sources are also saved, if they have changed since `fit` began.

    ``tf.data`` and Grain pipelines, and loaders with ``state_dict()`` and
    ``load_state_dict(state)``, continue at the saved position. Other data are read again from the
    beginning of the epoch, and generators with ``steps_per_epoch`` from the beginning of the first
    epoch. Batches that were already trained on are then skipped, and other callbacks get no events
    for them.

    A backup contains these attributes of your own callbacks and data sources: numbers, strings,
    arrays, and lists and dicts of these. It also contains random generators and other objects in
    attributes, if they exist when `fit` begins. For anything else, define ``state_dict()`` and
    ``load_state_dict(state)`` in the class of the callback or data source. When a backup is
    written, a warning names the values that cannot be restored from it.

    The chief writes each file under a temporary name first, so that no file is incomplete. In a
    restarted script, the chief reads the newest complete backup and sends the values to the other
    workers. The chief warns of each damaged backup. `fit` raises an error if the backup belongs to
    another script (with other layers, optimizer, losses or form of data), or if another run uses
    the folder.

    If the workers divide the state (``sharding=``) and all of them see the folder, each worker
    writes and reads its own shards. The chief writes its own file last, and a backup without this
    file is not used. Backups with and without shards can be restored by any number of workers, with
    any ``sharding``. `fit` calls this callback after all other callbacks, whatever its position in
    the list.

    If data are shuffled, the script must set the seed (``keras.utils.set_random_seed``).

    Example::

        backup = kd.callbacks.BackupAndRestore("backups")
        model.fit(x, y, epochs=2, callbacks=[backup])  # continues if the script is restarted

    Source: ``keras.callbacks.BackupAndRestore``.
    """

    def __init__(
        self,
        backup_dir: str | Path,
        save_freq: Literal["epoch", "auto"] | int = "epoch",
        *,
        hours_between_failures: float | None = None,
        keep: int = 2,
        delete_checkpoint: bool = True,
        file_mode: int = storage.PRIVATE,
        resume: Literal["exact", "weights"] = "exact",
        keep_in_memory: bool = False,
    ) -> None:
        """Makes the callback.

        Args:
            backup_dir: The folder of the backups, which only this run may use. The chief's machine
                must see it. If the workers divide the state and the machines of all workers see
                the folder, each worker writes its own shards.
            save_freq: When to save a backup. ``"epoch"``: at the end of each epoch. A number `n`:
                also after every `n` batches of an epoch. ``"auto"``: at an interval chosen so that
                backups and failures together cost the least time. By Daly's formula, this is about
                ``sqrt(2 * cost * time between failures)``. The cost is the time for which training
                stops for the first backup. That backup is made after 20 batches or at the end of
                the first epoch. The first backup is then written once more, to store the chosen
                number of batches. At the end of an epoch a backup is made if at least half of this
                number has passed since the last backup. At the end of the last epoch a backup
                is always made.
            hours_between_failures: The mean time between failures of the job, for
                ``save_freq="auto"``; None means 8,000 hours divided by the number of replicas. If
                the cluster takes a machine away, that also counts as a failure.
            keep: How many backups are kept, at least 1. With 2, there is an older backup to use if
                the newest is damaged.
            delete_checkpoint: Whether the backups are removed when training ends without an error.
                Under ``kerasdist run`` the last backup is kept until the script has ended.
            file_mode: The permissions of the files, which contain the model and the state of the
                callbacks; by default only the owner may read them.
            resume: What to do if the backup is of another call of `fit`, for example with another
                loss, optimizer or batch size. ``"exact"``: raise an error. ``"weights"``: start
                training anew with the weights of the backup. Their shapes must equal the shapes of
                the model's weights.
            keep_in_memory: Whether, under ``kerasdist run``, each backup is first written to the
                memory of each host, and then copied to the disk in the background. As long as one
                host of the job remains, a restarted job does not need the copy on the disk. On each
                host, memory (``/dev/shm``) for `keep` + 1 backups is used. Each of these backups
                contains the whole state, even if the workers divide the state.

        Raises:
            ValueError: If an argument has an invalid value.
        """
        super().__init__()
        if not str(backup_dir):
            raise ValueError("Expected a folder. Received: backup_dir=''.")
        is_number = isinstance(save_freq, int) and save_freq > 0
        if save_freq not in ("epoch", "auto") and not is_number:
            raise ValueError(
                "Expected save_freq to be 'epoch', 'auto' or a positive number of batches. "
                f"Received: {save_freq=}."
            )
        if hours_between_failures is not None and (
            save_freq != "auto" or not 0 < hours_between_failures < math.inf
        ):
            raise ValueError(
                "Expected a positive number of hours_between_failures, and save_freq='auto', which "
                f"alone uses it. Received: {hours_between_failures=}, {save_freq=}."
            )
        if keep < 1:
            raise ValueError(f"Expected to keep at least one backup. Received: {keep=}.")
        if resume not in ("exact", "weights"):
            raise ValueError(f"Expected resume to be 'exact' or 'weights'. Received: {resume=}.")
        self.backup_dir = Path(backup_dir)
        self.save_freq = save_freq
        self._interval = Interval(save_freq, hours_between_failures)
        self._keep = keep
        self._mode = file_mode
        self._delete = delete_checkpoint
        self._takes_weights = resume == "weights"
        self._keeps_in_memory = keep_in_memory
        self._others: Sequence[Callback] = ()
        self._listed: Sequence[Callback] = ()
        self._unmute = contextlib.ExitStack()
        self._position, self._validation = Position(), Position()
        self._epoch = 0
        self._logs: dict[str, object] | None = None
        self._resumed: Mapping[str, Any] | None = None
        self._skipped = 0
        self._stops = False
        self._said: set[str] = set()
        # `listens`: whether a signal may end the script (`experimental.preempt`).
        # `asked_to_leave`: whether that signal has come.
        self.listens = self.asked_to_leave = self._in_training = False

    def ask_to_leave(self) -> bool:
        """Asks this callback to save a backup after the next batch, and then to end the script.

        Returns False outside of training, or if a backup was already asked for.
        """
        heard = self._in_training and not self.asked_to_leave
        self.asked_to_leave = True
        return heard

    def leave(self, epoch: int, batches: int) -> NoReturn:
        """Saves a backup, then ends the script with exit code 76. All workers must call this."""
        self.save(epoch, batches)
        self._files.wait()
        raise SystemExit(ExitCode.PREEMPTED)

    def beside(self, others: Sequence[Callback], listed: Sequence[Callback]) -> None:
        """Stores the other callbacks of this call of `fit`; each backup contains their state.

        ``others`` are the callbacks that the user passed. ``listed`` are the callbacks that Keras
        calls for them: the same objects, or objects that wrap them.
        """
        self._others, self._listed = others, listed

    def reads(self, position: Position, validation: Position) -> None:
        """Stores the objects that know how far the training and validation data have been read."""
        self._position, self._validation = position, validation

    def on_train_begin(self, logs: dict[str, object] | None = None) -> None:
        """Restores the newest backup of this call of `fit`. All workers must call this method."""
        self._in_training = True
        model: Any = self.model
        self._position.backs_up(self._interval, model.steps_per_execution)
        keras_compat.require_built(model)
        job = current_job()
        callbacks = [one for one in self._others if one is not model.history]
        parts = keras_compat.parts_of(model)
        self._remembering = Remembering([*callbacks, model.history], parts)
        self._trainable = keras_compat.trainable_layers(model)
        trainer = trainer_of(model)
        run = in_memory = None
        if self._keeps_in_memory:
            in_memory = memory.prepare(self.backup_dir, job, sends=trainer is not None)
        elif job is not None and trainer is not None and trainer.replicas.divides_state:
            run = name_of_run(self.backup_dir, job)
        self._files = RunFiles(
            self.backup_dir, self._keep, self._mode, job, run, self._takes_weights, in_memory
        )
        call = {"call": fit_call.of_model(model), "data": self._position.facts}
        self._call = {**call, "forms": forms_of(variables_of(model))}
        stored = self._files.newest(self._call)
        facts = None
        # On the chief, `newest` has already compared the facts in `self._call` with the backup's.
        # So only the backup's other facts are needed from here on.
        if stored is not None:
            there = stored.chiefs.facts.items()
            facts = {name: one for name, one in there if name not in self._call}
        told = self._files.number, self._files.refusal, self._files.of_this_call, facts
        if job is not None:
            told = job.broadcast_object("backup", told)
        self._files.number, refusal, of_this_call, facts = told
        if refusal is not None:
            place = "" if job is None else f"{job.who} "
            raise BackupError(f"{place}{refusal}")
        self._resumed = None
        self._skipped, self._stops = 0, False
        self._said.clear()
        with self._restoring():
            kept = facts.get("interval") if facts is not None and of_this_call else None
            replicas = 1 if trainer is None else trainer.replicas.num_replicas
            self._interval.train_begins(model.steps_per_execution, replicas, kept)
            found = facts.get("rows at once") if facts is not None and of_this_call else None
            if trainer is not None and found and found[0] == replicas:
                trainer.keep_rows(*found[1:])
            if facts is None:
                return
            facts |= {name: int(facts[name]) for name in ("number", "epoch", "batches")}
            self._files.number = facts["number"]
            if not of_this_call:
                self._take_weights(stored, facts["weights"])
                return
            build_optimizers(model, facts["optimizers"])
            variables, in_parts = all_variables_of(model), self._files.in_parts
            pairs = list(enumerate(variables))
            self._restore = partial(restore, model, pairs, stored, seen_by_all=in_parts)
            self._restore()
            self._begin(with_arrays(model, stored, facts, len(variables)))

    @contextlib.contextmanager
    def _restoring(self) -> Iterator[None]:
        """Turns errors in the `with` block into a BackupError with the number of the backup.

        Errors of kerasdist itself are raised unchanged.
        """
        try:
            yield
        except KerasdistError:
            raise
        except Exception as error:
            raise BackupError(
                f"Expected backup {self._files.number} in {self.backup_dir} to have values that "
                f"this script can restore. Received: {type(error).__name__}: {error}. Delete this "
                "backup; then the backup before it is used."
            ) from error

    def release(self) -> None:
        """Lets other runs use the folder."""
        release_folder(self.backup_dir)

    def _take_weights(self, stored: StoredVariables | None, there: Sequence[Sequence[Any]]) -> None:
        """Loads only the weights, from a backup of another call of `fit` (``resume="weights"``).

        All workers must call this method.
        """
        model: Any = self.model
        here = numbers_of_weights(model, variables_of(model))
        if [form for _, *form in there] != [form for _, *form in here]:
            raise BackupError(
                "Expected the weights of the backup to have the shapes and types of the model's, "
                f"for resume='weights'. Received: {[form for _, *form in there][:10]} in the "
                f"backup, {[form for _, *form in here][:10]} in the model. Take another folder."
            )
        numbers = [number for number, *_ in there]
        pairs = list(zip(numbers, model.weights, strict=True))
        restore(model, pairs, stored, seen_by_all=self._files.in_parts)

    def _begin(self, facts: Mapping[str, Any]) -> None:
        """Restores the values that Keras or the callbacks need before the first epoch begins."""
        model = self.model
        self._remembering.put_back(facts["callbacks"])
        if "validation" in facts:
            self._validation.go_to(facts["validation"], within=False)
        begin = facts["epoch"]
        if facts["stopping"] and not facts["batches"]:
            # When the backup was made, `stop_training` was set. So no further epoch is trained.
            begin = max((self.params or {}).get("epochs") or 0, begin)
        internals.INITIAL_EPOCH.set(model, begin)
        if facts["batches"]:
            self._resumed = facts
        else:
            # The backup was made between epochs. Random states and the position are restored now,
            # because the callbacks' `on_epoch_begin` may use them.
            self._put_back_random_states(facts)
            self._position.go_to(facts["position"], within=False)

    def on_epoch_begin(self, epoch: int, logs: dict[str, object] | None = None) -> None:
        """If the backup was made within this epoch, restores the rest of the backup.

        The rest includes the position in the data, and the values that Keras has reset as the epoch
        began, such as sums of metrics.
        """
        self._epoch, self._skipped = epoch, 0
        if self._resumed is not None:
            with self._restoring():
                self._go_on(self._resumed)
            self._resumed = None
        self._interval.epoch_begins(self._skipped)
        self._position.epoch_begins()

    def on_train_batch_end(self, batch: int, logs: dict[str, object] | None = None) -> None:
        """Saves a backup if one is due."""
        done = batch + 1
        self._logs = logs
        if done == self._skipped:
            self._unmute.close()
            if self._stops:
                keras_compat.model_of(self).stop_training = True
        self._position.batches_passed(done)
        if done <= self._skipped:
            return
        self._interval.batches_passed(done, self._wait_for_devices)
        if self.asked_to_leave and current_job() is None:  # in a job, `Vote` calls `leave`
            self.leave(self._epoch, done)
        if self._interval.is_due(done):
            self._save_and_choose(self._epoch, done)

    def on_test_begin(self, logs: dict[str, object] | None = None) -> None:
        """Records that the validation data are read once more."""
        self._validation.epoch_begins()

    def on_epoch_end(self, epoch: int, logs: dict[str, object] | None = None) -> None:
        """Saves a backup if one is due, and at the end of the last epoch."""
        if self.asked_to_leave and current_job() is None:
            self.leave(epoch + 1, 0)
        if epoch + 1 == (self.params or {}).get("epochs"):
            self.save(epoch + 1, 0)
        elif self._interval.is_due_at_end():
            self._save_and_choose(epoch + 1, 0)

    def on_train_end(self, logs: dict[str, object] | None = None) -> None:
        """Lets other runs use the folder; with ``delete_checkpoint=True``, removes the backups."""
        self._in_training = False
        self._unmute.close()
        internals.INITIAL_EPOCH.set(self.model, None)
        self._files.training_ended(removes=self._delete)

    def _save_and_choose(self, epoch: int, batches: int) -> None:
        """Saves a backup.

        With ``save_freq="auto"``, the first backup is saved twice. The time of the first save
        determines how many batches to train between two backups. The second save stores this
        number. All workers must call this method.
        """
        if self._interval.is_open and self._interval.is_measured:
            self._wait_for_devices()
            self._interval.choose(
                lambda: self.save(epoch, batches), self._files.wait, current_job()
            )
        self.save(epoch, batches)

    def _wait_for_devices(self) -> None:
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None:  # a model with its own train_step may have no optimizer
            ops.convert_to_numpy(optimizer.iterations)

    def save(self, epoch: int, batches: int) -> None:
        """Writes a backup from which a run continues after ``batches`` batches of ``epoch``.

        All workers must call this method. Each worker writes its own shards, and the chief writes
        everything else.
        """
        self._interval.saved(batches)
        self._files.begin_next()
        model: Any = self.model
        variables, trainer = all_variables_of(model), trainer_of(model)
        # A backup within an epoch compares batches and weights here. At the end of an epoch, when
        # `batches` is 0, `InSync` has already compared them.
        if batches and trainer is not None:
            when = f"batch {batches} of epoch {epoch + 1}"
            trainer.replicas.first_batches.require_equal_since(when)
            results.require_equal_weights(model, trainer.replicas, when)
        shards = {}
        if trainer is not None and self._files.in_parts:
            shards = shards_of(variables, trainer.replicas)
        arrays = to_write(variables, elsewhere=shards)
        if batches:
            add_up_anew(variables, arrays)
        job = current_job()
        of_gpus = [random_states.of_gpus()]
        if job is not None:
            of_gpus = job.gather_object("random states of GPUs", *of_gpus)
        kept = {"position": self._position.kept(batches), "validation": self._validation.kept(0)}
        parts = self._files.write_part(shards) if shards else []
        if parts is None:  # some worker could not write its part
            return
        facts: dict[str, Any] = {}
        if job is None or job.is_chief:
            facts = self._facts_for_file(variables, epoch, batches)
            self._say_what_is_lost()
            facts |= {"random of gpus": of_gpus, "parts": parts, **kept}
            facts = numbered(facts, arrays)
            facts["arrays"] = [[one.dtype.name, one.shape] for one in arrays[len(variables) :]]
            for one in self._others:
                # The backup is written after the files that ModelCheckpoint is writing now, because
                # a run that continues from the backup does not write them again.
                if isinstance(one, ModelCheckpoint):
                    one.wait()
        if job is not None and self._keeps_in_memory:
            facts = job.broadcast_object("a backup", facts)
            own = arrays[len(variables) :] if job.is_chief else []
            arrays[len(variables) :] = broadcast_arrays(model, own, facts["arrays"])
        channel = launcher.channel()
        if self._files.write(facts, arrays) and channel is not None:
            epochs = epoch if facts["stopping"] else (self.params or {}).get("epochs", 0)
            # For an elastic job the launcher starts spare processes that import these frameworks.
            loaded = [name for name in sys.modules if name in KNOWN]
            channel.tell({"backup": [epoch, batches, epochs], "frameworks": loaded})

    def _facts_for_file(self, variables: list[Any], epoch: int, batches: int) -> dict[str, object]:
        """Returns the facts about the run, for the chief's file."""
        trainer, rows_at_once = trainer_of(self.model), None
        if trainer is not None:
            replicas = trainer.replicas.num_replicas
            rows_at_once = replicas, trainer.most_rows, trainer.most_examples
        return {
            "number": self._files.number,
            "fit": self._files.fit,
            "epoch": epoch,
            "batches": batches,
            "stopping": bool(keras_compat.model_of(self).stop_training),
            "interval": self._interval.kept(),
            "rows at once": rows_at_once,
            **self._call,
            "weights": numbers_of_weights(self.model, variables),
            "optimizers": optimized_by(keras_compat.model_of(self), variables),
            "shapes": [list(one.shape) for one in variables],
            "random": random_states.kept(),
            "callbacks": self._remembering.state(),
            "logs": Encoder().encode(self._logs if batches else None, "logs"),
        }

    def _say_what_is_lost(self) -> None:
        """Warns, once for each attribute, of values that a restart could not restore."""
        lost = [f"of validation_data, {one}" for one in self._validation.lost()]
        lost += [*self._position.lost(), *self._remembering.lost()]
        if keras_compat.trainable_layers(keras_compat.model_of(self)) != self._trainable:
            lost.append("which layers are trainable, which a callback has changed")
        if trainer_of(self.model) is None:
            lost.append(
                "the place in the data and the other callbacks, since the model was made outside "
                "of a strategy's scope (make it in kd.OneDeviceStrategy(...).scope())"
            )
        lost = [one for one in lost if one.partition("[")[0] not in self._said]
        self._said.update(one.partition("[")[0] for one in lost)
        if lost:
            warn_user(
                f"The backups in {self.backup_dir} cannot bring back: {'; '.join(lost)}. A run "
                "that is started again begins with these as the script makes them. Of your own "
                "objects that exist when fit begins, a backup keeps numbers, strings, arrays, "
                "random generators, and lists and dicts of these. For anything else, define "
                "state_dict() and load_state_dict(state) in the callback's class."
            )

    def _go_on(self, facts: Mapping[str, Any]) -> None:
        model = keras_compat.model_of(self)
        self._restore()
        self._remembering.put_back(facts["callbacks"])
        self._position.go_to(facts["position"], within=True)
        self._skipped = facts["batches"]
        self._stops = facts["stopping"]
        # The callbacks already got the events of the skipped batches before the restart. So these
        # events are not passed to the callbacks now.
        for callback in self._listed:
            self._unmute.enter_context(replaced_entries(vars(callback), _MUTED))
        logs = decode(facts["logs"])

        def then() -> None:
            with self._restoring():
                self._put_back_random_states(facts)

        keras_compat.skip_batches(model, self._skipped, self._position.unread, logs, then)

    def _put_back_random_states(self, facts: Mapping[str, Any]) -> None:
        self._position.restore_random_states(facts["random"])
        job = current_job()
        rank = 0 if job is None else job.rank
        # If the job that saved the backup had no worker of this rank, there are no states for this
        # worker's GPUs.
        for states in facts["random of gpus"][rank : rank + 1]:
            random_states.put_back_gpus(states)


def _nothing(batch: int, logs: dict[str, object] | None = None) -> None:
    """Ignores the event of a batch."""


_MUTED = {"on_train_batch_begin": _nothing, "on_train_batch_end": _nothing}
