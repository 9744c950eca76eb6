"""The step functions that Keras's loops call: each is one graph that contains all replicas."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, final

import keras
import tensorflow as tf

from kerasdist import keras_compat
from kerasdist.backends.base import metering
from kerasdist.backends.base.interface import ReplicaSet
from kerasdist.backends.tensorflow.fit.batches import (
    OwnRows,
    PlacedBatch,
    compared_of,
    division_errors,
    on_host,
)
from kerasdist.backends.tensorflow.private.prefetching import PlacedIterator, in_a_row, untuned
from kerasdist.backends.tensorflow.replica.values import concat
from kerasdist.check.first_batch import FirstBatchCheck
from kerasdist.core.context import current

# The types of iterators from which a graph can read batches.
ITERATORS = (tf.data.Iterator, PlacedIterator)


def compiled(function: Callable[..., Any], *, eagerly: bool) -> Callable[..., Any]:
    """Compiles a function. A second batch size causes a new trace, but further sizes do not."""
    # `autograph=False`, because AutoGraph does not convert user code in Keras's own steps.
    return function if eagerly else tf.function(function, reduce_retracing=True, autograph=False)


@final
class StepsOnIterator:
    """``train_function`` or ``test_function``: runs one or several steps and returns the logs.

    Attributes:
        count: How many steps a call runs at most.
    """

    def __init__(
        self, trainer: Any, step: Callable[[Any, list[keras.Variable]], Any], *, trains: bool
    ) -> None:
        """Prepares the function; TensorFlow traces it at its first call.

        `step` takes a batch and a list. With several workers, it fills the list with the variables
        whose aggregated values it reads at the end of the step. `step` returns four values: the
        first rows of the batch; a list with the number of examples and, if workers compare batches,
        a vector of checksums; the logs; and the values of the variables in the list. With `trains`,
        the function reports its steps to the `Meter` of this `fit`, if there is one.
        """
        model, self._replica_set = trainer.model, trainer.replicas
        self.count: int = model.steps_per_execution
        # The variables whose aggregated values a step returns. They are found while the step is
        # traced. After every step the values are cached, so that later reads need no collective.
        self._read: list[keras.Variable] = []

        count, eagerly = trainer.replicas.count_batch, model.run_eagerly

        def on_batch(batch: object) -> Any:
            if count is not None:
                with tf.control_dependencies(_tensors(batch)):
                    count()
            return step(batch, self._read)

        self._on_batch = compiled(on_batch, eagerly=eagerly)
        self._trains = trains
        # TensorFlow traces the body of a loop twice, so the body calls a `tf.function`, which is
        # traced only once. A single step is traced inline, because building a function call would
        # take as long as another trace.
        inside = partial(self._once, on_batch) if self.count == 1 else self._in_a_loop
        self._on_iterator = None if eagerly else compiled(inside, eagerly=False)

    def __call__(self, iterator: Any) -> Any:
        """Runs the steps; returns the logs of the last step."""
        self._replica_set.begin_step()
        meter = current.meter if self._trains else None
        with division_errors():
            if self._on_iterator is not None and isinstance(iterator, ITERATORS):
                first, totals, logs, values, measured = self._on_iterator(iterator)
                sizes = [0] * self.count  # not used, because `measured` has the sizes
            else:
                first, totals, logs, values = self._do_one_by_one(iterator)
                sizes, measured = [total for total in totals if not total.shape.rank], None
            if meter is not None:
                meter.done(len(sizes), sum(map(int, sizes)), logs, measured)
            if self._replica_set.job is not None:
                _require_equal_beginnings(self._replica_set, first)
                self._replica_set.group.remember(self._read, values)
                self._note(totals)
            return logs

    def _note(self, totals: Sequence[Any]) -> None:
        """Records numbers of examples and vectors of checksums, which the workers compare later."""
        for total in totals:
            if total.shape.rank:
                sums = total.numpy().view("uint32").tolist()
                self._replica_set.first_batches.note(sums)
            else:
                self._replica_set.first_batches.history.add(f"{int(total)} examples")

    def _do_one_by_one(self, iterator: Any) -> Any:
        done = [self._on_batch(batch) for batch in itertools.islice(_batches(iterator), self.count)]
        if not done:
            raise tf.errors.OutOfRangeError(None, None, "End of the data")
        totals = [total for _, totals, *_ in done for total in totals]
        return (done[0][0], totals, *done[-1][2:])

    def _once(self, on_batch: Callable[[Any], Any], iterator: Any) -> Any:
        batch, seconds = _timed(iterator.get_next)
        first, totals, logs, values = on_batch(batch)
        return first, totals, logs, values, _measured(totals, seconds)

    def _in_a_loop(self, iterator: Any) -> Any:
        """Runs the steps of one call in a loop of the graph, which ends early if the data ends."""
        first, *done = self._once(self._on_batch, iterator)

        def body(count: Any, _: Any, done: Any) -> Any:
            batch, seconds = _timed(iterator.get_next_as_optional)
            has_value = batch.has_value()

            def another() -> Any:
                totals, *_, measured = done
                _, more, logs, values = self._on_batch(batch.get_value())
                added = [one + own for one, own in zip(totals, more, strict=True)]
                return [added, logs, values, measured + _measured(more, seconds)]

            done = tf.cond(has_value, another, lambda: done)
            return count + 1, has_value & (count + 1 < self.count), done

        *_, done = tf.while_loop(
            lambda _, more, *__: more, body, (tf.constant(1), tf.constant(True), done)
        )
        return (first, *done)


def _measured(totals: Sequence[tf.Tensor], seconds: tf.Tensor) -> tf.Tensor:
    """Returns a step's numbers for the `Meter`: examples, steps (1), seconds waited for data."""
    return tf.stack([tf.cast(totals[0], tf.float64), tf.ones([], tf.float64), seconds])


def _timed(read: Callable[[], Any]) -> tuple[Any, tf.Tensor]:
    """Reads a batch in a graph; returns the batch, and the seconds that reading took."""
    begin = tf.timestamp()
    with tf.control_dependencies([begin]):
        batch = read()
        ready = [batch.has_value()] if hasattr(batch, "has_value") else _tensors(batch)
    with tf.control_dependencies(ready):
        return batch, tf.timestamp() - begin


def _tensors(batch: object) -> list[tf.Tensor]:
    flat = keras.tree.flatten(batch.parts if isinstance(batch, PlacedBatch) else batch)
    parts = [one for leaf in flat for one in tf.nest.flatten(leaf, expand_composites=True)]
    return [one for one in parts if tf.is_tensor(one)]


def _require_equal_beginnings(replica_set: ReplicaSet, first: object) -> None:
    """Checks that an iteration over the data begins with the same rows on all workers.

    If the batch is the first one of an iteration, `first` contains the first rows of this batch.
    Otherwise `first` contains no rows, and nothing is checked.
    """
    if any(leaf.shape.rank and leaf.shape[0] for leaf in keras.tree.flatten(first)):
        replica_set.first_batches.begin(first)
        replica_set.first_batches.compare()


@final
class FirstStepChecked:
    """A ``train_function`` that also compares its first steps with the same steps on one device.

    When no comparison is left to do, the model's ``train_function`` is set to `steps`, which
    compares nothing. Usually the graph of a step reads its batches from Keras's iterator. In two
    calls this object reads the batches itself, to compare a step on them: in the first call, and in
    the last call of the first epoch whose length is known beforehand, because the last batch may
    have another size. The object then passes these batches on in an iterator of the same type, so
    that the same graph can read them.

    Attributes:
        batches: How many batches an epoch has; None if that is not known.
    """

    def __init__(self, model: Any, steps: StepsOnIterator) -> None:
        self.batches: int | None = None
        self._model = model
        self._steps = steps
        self._check = FirstBatchCheck(model)
        self._has_begun = False
        self._iterator: Callable[[], Any] = lambda: None
        self._calls = 0  # how many calls this epoch has had

    def __call__(self, iterator: Any) -> Any:
        """Compares a step if a comparison is due; then runs the steps as `StepsOnIterator` does."""
        is_placed = isinstance(iterator, ITERATORS)
        is_last = is_placed and self._ends_epoch(iterator)
        if not self._has_begun and not keras_compat.is_complete(self._model):
            # This call of a user-defined step builds the model, so the next call is checked.
            self._has_begun = True
            return self._steps(iterator)
        if is_placed and not is_last and not self._check.wants_any:
            return self._steps(iterator)
        iterator = _looked_at(iterator, self._steps.count, self._check.look)
        is_done = self._check.is_done or (is_last and not self._check.wants_any)
        if is_done and self._model.train_function is self:
            self._model.train_function = self._steps
        return self._steps(iterator)

    def goes_on(self, iterator: Any) -> None:
        """Records that `iterator` continues an epoch, and does not begin one.

        `RowsFound` calls this method. It has read the epoch's first batches from `iterator`, and
        has passed them to this object in another iterator, which `_looked_at` has made.
        """
        self._iterator = weakref.ref(iterator)

    def _ends_epoch(self, iterator: Any) -> bool:
        """Counts a call; returns whether it is known to be the last call of an epoch."""
        if iterator is not self._iterator():
            if self._calls and self.batches is None:
                self.batches = self._calls * self._steps.count
            self._iterator, self._calls = weakref.ref(iterator), 0
        self._calls += 1
        return self._calls * self._steps.count >= (self.batches or math.inf)


@final
class RowsFound:
    """The ``train_function`` for the first call in a `fit`; it finds how many rows fit in memory.

    Attributes:
        function: The train function that runs the steps, and replaces this object.
    """

    def __init__(self, trainer: Any, function: Callable[[Any], Any]) -> None:
        self.function = function
        self._trainer = trainer

    def __call__(self, iterator: Any) -> Any:
        """Finds the number of rows, then runs the steps."""
        trainer, model = self._trainer, self._trainer.model
        model.train_function = self.function
        if not keras_compat.is_complete(model):  # the steps of this call build the model
            return self.function(iterator)
        before = trainer.most_rows
        batches = _looked_at(iterator, model.steps_per_execution, trainer.find_rows)
        if trainer.most_rows != before:
            # The graph of the old function would call the model with too many rows at once.
            model.make_train_function(force=True)
            model.train_function = model.train_function.function
        function = model.train_function
        logs = function(batches)
        if isinstance(function, FirstStepChecked) and isinstance(iterator, ITERATORS):
            function.goes_on(iterator)
        return logs


def _looked_at(iterator: Any, count: int, look: Callable[[Any, int], None]) -> Any:
    """Calls `look` with each of the next `count` batches of an iterator, and the batch's size.

    Returns an iterator that yields these batches again.
    """
    batches = list(itertools.islice(_batches(iterator), count))
    for batch in map(on_host, batches):
        look(batch, int(batch.total) if isinstance(batch, OwnRows) else metering.rows_of(batch))
    if not batches:
        return iterator  # the next step raises the error for the end of the data
    if isinstance(iterator, PlacedIterator):
        return iterator.over(batches)
    if isinstance(iterator, tf.data.Iterator):
        return iter(untuned(in_a_row(batches, iterator.element_spec)))
    return iter(batches)


def _batches(iterator: Any) -> Iterator[Any]:
    return iterator if isinstance(iterator, ITERATORS) else map(as_tensors, iterator)


@final
class PredictionOnBatches:
    """``predict_function``: predicts a list of global batches and concatenates the outputs."""

    def __init__(self, trainer: Any) -> None:
        """Prepares the function; TensorFlow traces it at its first call."""
        self._trainer = trainer
        self._is_built = False
        self._step = compiled(trainer.predict_batch, eagerly=trainer.model.run_eagerly)

    def __call__(self, batches: Sequence[Any]) -> Any:
        """Returns the outputs for all batches, concatenated."""
        if not self._is_built:
            self._trainer.build_for_prediction(batches[0])
            self._is_built = True
        replica_set = self._trainer.replicas
        replica_set.begin_step()
        compared = compared_of(batches[0])
        if compared is not None:
            _require_equal_beginnings(replica_set, compared.first_rows)
        with division_errors():
            outputs = [self._step(as_tensors(batch)) for batch in batches]
        if len(outputs) == 1:
            return outputs[0]
        return keras.tree.map_structure(_in_a_row, *outputs)


def as_tensors(batch: object) -> Any:
    """Converts a batch's arrays to tensors, so that a new batch size does not retrace the step."""

    def tensor(leaf: Any) -> Any:
        if leaf is None or tf.is_tensor(leaf) or isinstance(leaf, tf.experimental.Optional):
            return leaf
        return tf.convert_to_tensor(leaf)

    return keras.tree.map_structure(tensor, batch)


def _in_a_row(*parts: Any) -> Any:
    """Concatenates the outputs for several batches; scalars are stacked."""
    if parts[0] is None:
        return None
    return tf.stack(parts) if parts[0].shape.rank == 0 else concat(parts, 0)
