"""The trainers of models made under a strategy on TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, final

import keras
import tensorflow as tf

from kerasdist import config, keras_compat
from kerasdist.backends.base.kept_state import KeptState
from kerasdist.backends.base.user_places import kept_state_of, state_kept
from kerasdist.backends.tensorflow.fit import passes
from kerasdist.backends.tensorflow.fit.batches import (
    OwnRows,
    PlacedBatch,
    compared_of,
    counted_rows,
    none_for_optional,
)
from kerasdist.backends.tensorflow.fit.steps import (
    FirstStepChecked,
    PredictionOnBatches,
    RowsFound,
    StepsOnIterator,
)
from kerasdist.backends.tensorflow.private.compiled import asks_for_xla, uncompiled
from kerasdist.backends.tensorflow.replica.collectives import collectives_here
from kerasdist.backends.tensorflow.replica.variables import averaged, check_mirrored, take_on
from kerasdist.check import memory
from kerasdist.check.first_batch import may_differ
from kerasdist.core.context import current, whole_step
from kerasdist.core.user_warnings import warn_user
from kerasdist.errors import UnsupportedError
from kerasdist.training.metrics import KnownValues, metrics_of, prepare
from kerasdist.training.passes import refused
from kerasdist.training.trainer import Original, ReplicatedTrainer, symbol_of

if TYPE_CHECKING:
    from kerasdist.backends.tensorflow.workers.group import Group


class _InPasses(ReplicatedTrainer):
    """A trainer that can call the model for some rows of a batch at a time, to save memory."""

    HOOKED = (*ReplicatedTrainer.HOOKED, "__call__", "build_if_needed")

    # How many batches the data of the last `fit` or `evaluate` has; None if that is not known.
    _batches_of_call: int | None = None

    def __call__(self, original: Original, *args: object, **kwargs: object) -> Any:
        """Calls the model, several times if there are more examples than one call may get."""
        outputs = passes.calls(self, original, args, kwargs)
        trial = current.trial
        if trial is not None:
            trial.record_outputs(self.model, outputs)
        return outputs

    def build_if_needed(
        self, original: Original, iterator: Any = None, data_batch: Any = None
    ) -> None:
        """Builds losses, metrics and optimizer before training, if the model accepts the data.

        They must be built before training, because a backup restores the values only of metrics
        that are built. On the other backends Keras itself builds them at this time.
        """
        if keras_compat.has_built_layers(self.model):
            spec = data_batch if iterator is None else keras_compat.batch_spec(iterator)
            with suppress(Exception):  # the step itself will report data that does not fit
                _build_from(self.model, spec)

    def require_passes(self) -> None:
        """Raises an error if the model is known not to support several calls per batch."""
        if self.model.jit_compile:
            raise refused("jit_compile=True")
        super().require_passes()

    def make_function(self, name: str, original: Original, force: bool = False) -> Any:
        """Makes a train, test or predict function.

        After `config.set_most_examples_at_once("auto")`, a train function is wrapped in a
        `RowsFound`, which finds how many rows of a batch fit in memory at once.
        """
        function = super().make_function(name, original, force)
        if isinstance(function, FirstStepChecked):
            function.batches = self._batches_of_call
        trains, most = name == "make_train_function", config.most_examples_at_once()
        if trains and most == "auto" and not isinstance(function, RowsFound):
            function = self.model.train_function = RowsFound(self, function)
        return function

    def _find_rows(self, rows: Any, count: int, examples: int) -> None:
        from kerasdist.backends.tensorflow.fit.trial import TensorFlowMemoryTrial  # few runs use it

        attempt = partial(memory.try_step, self, TensorFlowMemoryTrial, rows)
        memory.find(self, examples, count, attempt)


@final
class PlacedTrainer(_InPasses):
    """The trainer for one device; it uses the functions of Keras's own trainer."""

    def find_rows(self, batch: Any, examples: int) -> None:
        """Finds how many rows the device has memory for."""
        self._find_rows(batch, examples, examples)

    def new_function(self, step: str, original: Original) -> Callable[..., Any]:
        """Returns a function that calls Keras's own function in the context of the strategy.

        A train function also reports its steps to the `Meter` of this `fit`, if there is one.
        """
        original(force=True)
        function = getattr(self.model, step.replace("step", "function"))

        def run(data: object) -> Any:
            with whole_step(self.strategy):
                done = function(data)
            if current.meter is not None and step == "train_step":
                current.meter.done(self.model.steps_per_execution, None, done)
            return done

        return run


@final
class TensorFlowTrainer(_InPasses):
    """Divides each batch over the replicas and runs the model's own step on every local batch."""

    _kept_in_predict: KeptState | None = None

    @staticmethod
    def prepare_other(model: Any, replicas: Any) -> None:
        """Mirrors those variables of a model and of its optimizer that are not mirrored yet."""
        take_on(model, replicas)
        optimizer = model.optimizer if model.compiled else None
        if optimizer is not None and not optimizer.built and model.built:
            # Otherwise Keras would make the optimizer's variables while a step is traced.
            optimizer.build(model.trainable_variables)

    def make_function(self, name: str, original: Original, force: bool = False) -> Any:
        """Makes a train, test or predict function.

        After a custom loop, moving statistics may differ between replicas, so this method first
        averages them.
        """
        if self._group.runs_loops:
            self._group.average(averaged(self.model.non_trainable_variables))
        return super().make_function(name, original, force)

    def new_function(self, step: str, original: Original) -> Callable[..., Any]:
        """Returns a function whose graph, or eager code, runs the step on all replicas."""
        model, trains = self.model, step == "train_step"
        if step == "predict_step":
            # `take_on` drops the model's compiled functions if it recreates variables. So
            # `take_on` is called before the new function is made.
            take_on(model, self.replicas)
            self._kept_in_predict = kept_state_of(model)
            return PredictionOnBatches(self)
        own = getattr(model, step)
        self._prepare(own)
        # Replicas can exchange values in the graph of a step, but not inside of a `tf.function`
        # that this graph calls. So if the user's step is a `tf.function`, its Python code is used.
        on_batch = partial(self._step_on_batch, uncompiled(own), kept_state_of(model))
        steps = StepsOnIterator(self, on_batch, trains=trains)
        return FirstStepChecked(model, steps) if trains and may_differ(model) else steps

    @property
    def trial_class(self) -> type[Any]:
        """The class of trials. A trial runs one step, either on one device or on the replicas."""
        from kerasdist.backends.tensorflow.fit.trial import TensorFlowTrial  # few runs use it

        return TensorFlowTrial

    def find_rows(self, batch: Any, examples: int) -> None:
        """Finds how many rows a replica has memory for. All workers must call this method."""
        first = self._group.split(batch)[0]
        self._find_rows(first.rows, int(first.size), examples)

    @property
    def _group(self) -> Group:
        return self.replicas.group

    def _step_on_batch(
        self,
        step: Callable[[Any], Any],
        kept: KeptState | None,
        batch: Any,
        read: list[keras.Variable],
    ) -> Any:
        """Runs a step on all replicas; returns the four values that `StepsOnIterator` describes."""
        own = self.note_overrides()

        def replica_step(data: object) -> Any:
            logs = step(data)
            if not own:  # a user-defined step may have built layers just now
                self._mark_equal_statistics()
            if self._group.is_of_workers:
                metrics = [v for metric in metrics_of(self.model) for v in metric.variables]
                known = {id(one): one for one in [*metrics, *self.model.variables]}
                read[:] = self._group.find_unsummed(known.values())
            return logs, collectives_here().end_step(read)

        # In Keras's own step, no code after the optimizer's update reads the updated variables. So
        # the update can wait until the end of the step, where all sums are made together. This
        # saves collectives. The update of an optimizer that has its own `apply` does not wait,
        # because such an optimizer may apply gradients more than once in a step.
        optimizer = self.model.optimizer
        is_direct = optimizer is None or keras_compat.applies_directly(optimizer)
        waits = own and is_direct and self._group.has_collectives
        # This context is for code that runs once for all replicas, such as an optimizer's update.
        with whole_step(self.strategy):
            done = self.replicas.run(
                self.strategy, replica_step, batch, kept=kept, updates_wait=waits
            )
        first, (_, values) = done[0]
        totals, compared = [tf.convert_to_tensor(first.total)], compared_of(batch)
        rows: Any = ()
        if compared is not None:
            rows = compared.first_rows
            totals.append(compared.checksums)
        if own:
            # A collective at the end of the step has summed the values of the variables in `read`,
            # so nothing is summed again here.
            with KnownValues(zip(read, values, strict=True)):
                return rows, totals, self.model.get_metrics_result(), values
        logs = self._group.mean_over_rows(
            [logs for _, (logs, _) in done], [local_batch.weight for local_batch, _ in done]
        )
        return rows, totals, logs, values

    def prepare_step(self, batch: Any) -> None:
        """Mirrors the variables, builds the model and makes the train function."""
        take_on(self.model, self.replicas)
        _build_from(self.model, batch)
        self.model.make_train_function()

    def step_on_replicas(self, step: Callable[[Any], Any], batch: Any) -> Any:
        """Runs a step on the replicas eagerly, and returns the step's logs."""
        _, _, logs, _ = self._step_on_batch(step, kept_state_of(self.model), batch, read=[])
        return logs

    def _mark_equal_statistics(self) -> None:
        if self._group.is_of_workers:
            layers = [self.model, *keras_compat.flat_layers(self.model)]
            self._group.mark_equal_statistics(layers)

    def predict_batch(self, batch: Any) -> Any:
        """Returns the outputs for the rows of all replicas.

        Of a scalar output, returns the mean over the examples.
        """
        group = self._group
        step = uncompiled(self.model.predict_step)
        done = self.replicas.run(self.strategy, step, batch, kept=self._kept_in_predict)
        sizes = [local_batch.size for local_batch, _ in done]

        def together(*parts: Any) -> Any:
            if parts[0] is None:
                return None
            if parts[0].shape.rank != 0:
                return group.concatenation(list(map(counted_rows, parts, sizes)), 0)[0]
            return group.mean_over_rows(parts, [local_batch.weight for local_batch, _ in done])

        return keras.tree.map_structure(together, *(outputs for _, outputs in done))

    def build_for_prediction(self, batch: Any) -> None:
        """Makes the variables of a model that was never called."""
        batch = batch.parts[0] if isinstance(batch, PlacedBatch) else batch
        batch = batch.rows if isinstance(batch, OwnRows) else batch
        if self.has_builtin("predict_step"):
            x, _, _ = keras_compat.unpack_x_y_sample_weight(batch)
            self.ensure_built(keras.tree.map_structure(none_for_optional, x))
        self._prepare(self.model.predict_step)

    def _prepare(self, step: Callable[[Any], Any]) -> None:
        model, native_strategy = self.model, self._group.native_strategy
        take_on(model, self.replicas)
        check_mirrored(model.variables, native_strategy, f"the layers of the model {model.name!r}")
        prepare(model, self.strategy)
        _require_no_state_of_rows(model)
        self._mark_equal_statistics()
        if (model.jit_compile or asks_for_xla(step)) and not model.run_eagerly:
            is_asked = "is compiled" if model.jit_compile else "has a step decorated"
            warn_user(
                f"The model {model.name!r} {is_asked} with jit_compile=True, but its steps run "
                "without XLA, with the same results: replicas wait for each other in the middle of "
                "a step, to sum gradients and metrics, and on TensorFlow code that XLA has "
                "compiled can neither wait for another device nor read its variables. Pass "
                "jit_compile=False to silence this. KERAS_BACKEND=jax compiles whole steps; in a "
                "custom loop, tf.function(jit_compile=True) around the forward and backward pass "
                "compiles these passes for each replica."
            )

    def build_if_needed(
        self, original: Original, iterator: Any = None, data_batch: Any = None
    ) -> None:
        """Builds the model from a batch's types and shapes, if the model has Keras's own step.

        To build the model, Keras would take a batch from the iterator. If a generator yields the
        batches, the steps would never get this batch. If the data is shuffled, taking a batch would
        change the state of the shuffle. A user-defined step may do anything with its data, and its
        model may have no `call`. Such a model is built when the step is traced.
        """
        take_on(self.model, self.replicas)
        self._batches_of_call = None if iterator is None else iterator.num_batches
        builds = self.has_builtin("train_step")
        if not builds or not keras_compat.internals.BUILD_BEFORE_FIT.is_there():
            super().build_if_needed(original, iterator, data_batch)
            return
        spec = data_batch if iterator is None else keras_compat.batch_spec(iterator)
        _build_from(self.model, spec)


def _require_no_state_of_rows(model: keras.Model) -> None:
    """Refuses a stateful RNN: its state has a row per example, but a replica has only some rows."""
    for layer in keras_compat.flat_layers(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise UnsupportedError(
                "Expected layers that keep no state of rows: a replica has only some of the rows. "
                f"Received: layer={layer.name!r} with stateful=True. Set KERAS_BACKEND=jax, on "
                "which it works, or use kerasdist.OneDeviceStrategy."
            )


# TensorFlow has the public name `tf.NoneTensorSpec` only since version 2.21.
_NoneTensorSpec: Any = type(tf.type_spec_from_value(None))


def _build_from(model: keras.Model, batch: object) -> None:
    # Plain Keras would not run the model's `call` here. So the changes that `call` makes to the
    # user's Python objects are undone.
    with state_kept(model):
        keras_compat.build_symbolically(model, keras.tree.map_structure(_description, batch))


def _description(leaf: Any) -> Any:
    return None if isinstance(leaf, tf.OptionalSpec | _NoneTensorSpec) else symbol_of(leaf)
