"""What is put before a model's own class on TensorFlow."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, final

import keras
import tensorflow as tf

from kerasdist import context, keras_seam
from kerasdist.backends.tensorflow import first_batches
from kerasdist.backends.tensorflow.adoption import take_on
from kerasdist.backends.tensorflow.batches import OwnRows, none_for_optional
from kerasdist.backends.tensorflow.collectives import collectives_here
from kerasdist.backends.tensorflow.first_step import FirstStepChecked
from kerasdist.backends.tensorflow.loss_watch import LossWatch
from kerasdist.backends.tensorflow.steps import (
    Around,
    PredictionOnBatches,
    StepsOnIterator,
    outputs_of_replicas,
)
from kerasdist.backends.tensorflow.variables import (
    averaged,
    check_mirrored,
    statistics_of,
)
from kerasdist.training.logs import global_logs
from kerasdist.training.metrics import metrics_of, settle
from kerasdist.training.trainer import ReplicatedTrainer
from kerasdist.user_warnings import warn_user

if TYPE_CHECKING:
    from kerasdist.backends.tensorflow.groups import Group
    from kerasdist.backends.tensorflow.replicas import MirroredReplicas

# The name under which a model holds its watch.
LOSS_WATCH = "_kerasdist_loss_watch"

# After how many steps on accelerators workers' sizes of batches are looked at.
_STEPS_PER_LOOK = 50


@final
class PlacedTrainer(ReplicatedTrainer):
    """Keras's own trainer on a device of choice; `fit` and its like are placed by the hooks."""


@final
class TensorFlowTrainer(ReplicatedTrainer):
    """Divides each batch over the replicas and runs the model's own step on every piece."""

    if TYPE_CHECKING:  # what Keras's own trainer and the model behind this class have
        replica_set: MirroredReplicas
        name: str
        variables: list[Any]
        non_trainable_variables: list[Any]
        metrics: list[Any]
        compiled: bool
        optimizer: Any
        train_step: Callable[[Any], Any]
        test_step: Callable[[Any], Any]
        predict_step: Callable[[Any], Any]
        jit_compile: bool
        run_eagerly: bool
        steps_per_execution: int
        _flatten_layers: Callable[[], Iterable[Any]]

    def make_train_function(self, force: bool = False) -> Any:
        """Makes the function that `fit` calls for each step."""
        self._leave_loops()
        if self.train_function is None or force:
            watch = LossWatch(self._group.engine, self.name, counts=self._group.is_divided)
            object.__setattr__(self, LOSS_WATCH, watch)  # past Keras's tracking of attributes

            def watched_step(batch: Any) -> Any:
                logs = self.train_step(batch)
                replica = context.replica()
                share = None if replica is None else replica.share
                watch.count(keras_seam.loss_tracker(self), None if share is None else share.total)
                return logs

            self.train_function = FirstStepChecked(self, self._step_function(watched_step, watch))
        return self.train_function

    def make_test_function(self, force: bool = False) -> Any:
        """Makes the function that `evaluate` calls for each step."""
        self._leave_loops()
        if self.test_function is None or force:
            self.test_function = self._step_function(self.test_step)
        return self.test_function

    def make_predict_function(self, force: bool = False) -> Any:
        """Makes the function that `predict` calls for each step."""
        self._leave_loops()
        if self.predict_function is None or force:
            self.predict_function = PredictionOnBatches(
                self._build_for_prediction,
                self._predict_batch,
                begin=self._begin_prediction,
                eagerly=self.run_eagerly,
            )
        return self.predict_function

    def _begin_prediction(self, batch: Any) -> None:
        self.replica_set.begin_step()
        self._compare(_beginnings_of(batch))

    def _compare(self, beginnings: Any) -> None:
        if first_batches.are_known(beginnings):
            self.replica_set.first_batches.require_equal(first_batches.read(beginnings))

    def get_metrics_result(self) -> dict[str, Any]:
        """Returns the metrics' results; after an epoch it looks whether the loss is finite."""
        results = super().get_metrics_result()
        watch = vars(self).get(LOSS_WATCH)
        if (
            watch is not None
            and tf.executing_eagerly()
            and tf.distribute.in_cross_replica_context()
        ):
            watch.warn(results.get("loss", 0.0))
        return results

    @property
    def _group(self) -> Group:
        return self.replica_set.group

    def _leave_loops(self) -> None:
        if self._group.runs_loops:
            self._group.average(averaged(self.non_trainable_variables))

    def _step_function(
        self, step: Callable[[Any], Any], watch: LossWatch | None = None
    ) -> StepsOnIterator:
        self._prepare()
        # What a step reads: noted while it is traced, not looked for again after each step.
        read: list[Any] = []

        def end(done: tuple[Any, Any]) -> Any:
            logs, values = done
            self._group.note(read, values)
            if watch is not None and job is not None and next(is_looked_at):
                watch.require_equal_sizes(read, values, job, len(self._group.local))
            return logs

        job = self.replica_set.job
        # To read a number of a step that a GPU has not ended yet would wait for it.
        every = 1 if self._group.shares_memory else _STEPS_PER_LOOK
        is_looked_at = itertools.cycle([True] + [False] * (every - 1))
        around = Around(
            begin=self.replica_set.begin_step,
            compare=self._compare,
            end=end,
        )
        return StepsOnIterator(
            lambda batch: self._step_on_batch(step, batch, watch, read),
            self.steps_per_execution,
            around,
            eagerly=self.run_eagerly,
        )

    def _step_on_batch(
        self, step: Callable[[Any], Any], batch: Any, watch: LossWatch | None, read: list[Any]
    ) -> tuple[Any, tuple[Any, Any]]:
        """Does a step; returns what its batch is compared by, and logs with what they need."""
        watched = () if watch is None else watch.variables
        own = self.runs_kerass_own_steps

        def replica_step(data: Any) -> Any:
            logs = step(data)
            if not own:  # which may have built layers
                self._group.note_equal(statistics_of(self._flatten_layers()))
            local = {} if own else self.get_metrics_result()
            read[:] = self._costly(watched)
            return logs, local, collectives_here().end_step(read)

        # In a step of Keras's own nothing that follows the optimizer's step sees what it did.
        done = self.replica_set.run(
            self.bound_strategy, replica_step, batch, updates_wait=own and self._group.is_divided
        )
        _, (_, _, values) = done[0]
        with _known(read, values):
            results = self.get_metrics_result()
        beginnings = _beginnings_of(batch)
        if own:
            return beginnings, (results, values)
        everyone = self._group.everyones(
            [(logs, local, piece.share.weight) for piece, (logs, local, _) in done]
        )
        all_logs = global_logs(
            [logs for logs, _, _ in everyone],
            [local for _, local, _ in everyone],
            results,
            [weight for _, _, weight in everyone],
        )
        return beginnings, (all_logs, values)

    def prepare_step(self, batch: Any) -> None:
        """Makes what a training step needs."""
        self._take_on()
        self._build_from(batch)
        self.make_train_function()

    def step_on_replicas(self, step: Callable[[Any], Any], batch: Any) -> Any:
        """Takes a step on the replicas, eagerly, and returns its logs.

        Args:
            step: Takes a replica's piece of the batch.
            batch: A batch as the group takes it.
        """
        read: list[Any] = []
        _, (logs, values) = self._step_on_batch(step, batch, None, read)
        self._group.note(read, values)
        return logs

    def _costly(self, watched: Sequence[Any]) -> list[Any]:
        """The variables of which other workers hold a part.

        Args:
            watched: Besides those of the model, those that a kind of step writes. (They are in no
                other kind, which may have been compiled before they were made.)
        """
        if not self._group.is_divided:
            return []
        known = [v for metric in metrics_of(self) for v in metric.variables]
        known += [*self.variables, *watched]
        every = {id(variable): variable for variable in known}.values()
        return self._group.costly([one for one in every if one.synchronization == "on_read"])

    def _predict_batch(self, batch: Any) -> Any:
        done = self.replica_set.run(self.bound_strategy, self.predict_step, batch)
        return outputs_of_replicas(
            self._group, [outputs for _, outputs in done], [piece.share for piece, _ in done]
        )

    def _build_for_prediction(self, batch: Any) -> None:
        batch = batch.rows if isinstance(batch, OwnRows) else batch
        if self.has_kerass_own("predict_step"):
            x, _, _ = keras_seam.unpack_x_y_sample_weight(batch)
            self.ensure_built(keras.tree.map_structure(none_for_optional, x))
        self._prepare()

    def _take_on(self) -> None:
        """Gives what was made outside of the scope copies: layers, the optimizer, metrics."""
        take_on(self, self._group.engine, self.bound_strategy.options.batch_norm)

    def _prepare(self) -> None:
        engine = self._group.engine
        self._take_on()
        check_mirrored(self.variables, engine, f"the layers of the model {self.name!r}")
        for metric in metrics_of(self):
            settle(metric, self.bound_strategy)
        self._group.note_equal(statistics_of(self._flatten_layers()))
        if self.jit_compile and not self.run_eagerly:
            warn_user(
                f"The model {self.name!r} is compiled with jit_compile=True, but on TensorFlow XLA "
                "cannot compile a step that runs on several devices: it runs without XLA, with the "
                "same results. Pass jit_compile=False to silence this."
            )

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Builds the model from the description of a batch, where Keras's own step will call it.

        Keras takes a batch from the iterator for that, which a generator would lose, and which
        would move the state of a shuffle. Plain Keras builds nothing here: a user-defined step may
        do anything with its data, and a model may have no `call`. What is not built before such a
        step, it builds while it is traced.
        """
        self._take_on()
        if iterator is not None:
            data_batch = iterator._get_iterator().element_spec
        if self.has_kerass_own("train_step"):
            self._build_from(data_batch)
        elif keras_seam.has_built_layers(self):
            # Only metrics, losses and the optimizer are left, if it fits the data.
            with suppress(Exception):
                self._build_from(data_batch)

    def _build_from(self, batch: Any) -> None:
        self._symbolic_build(data_batch=keras.tree.map_structure(_description, batch))


def _beginnings_of(batch: Any) -> Any:
    return batch.beginnings if isinstance(batch, OwnRows) else ()


def _known(variables: Sequence[Any], values: Sequence[Any]) -> AbstractContextManager[Any]:
    """Lets variables be read as what is known of them."""
    pairs = list(zip(variables, values, strict=True))
    return keras.StatelessScope(pairs) if pairs else nullcontext()


def _description(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, tf.OptionalSpec | tf.NoneTensorSpec):
        return None
    return keras.KerasTensor(tuple(leaf.shape), keras.backend.standardize_dtype(leaf.dtype))
