"""The functions that Keras's loops call: one compiled graph with all replicas of a step in it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import keras
import tensorflow as tf

from kerasdist.backends.tensorflow.batches import counted_rows, division_errors
from kerasdist.backends.tensorflow.groups import Group
from kerasdist.replica_context import BatchShare
from kerasdist.training.logs import global_logs

Step = Callable[[Any], Any]


def compiled(function: Callable[..., Any], *, eagerly: bool) -> Callable[..., Any]:
    """Returns a function as one graph, that other sizes of a batch do not make anew.

    Args:
        function: A function of tensors.
        eagerly: Whether to leave it as it is.
    """
    if eagerly:
        return function
    # The user's code stays as it is, as in Keras's own step.
    function = tf.autograph.experimental.do_not_convert(function)
    return tf.function(function, reduce_retracing=True)


@dataclass(frozen=True)
class Around:
    """What a call of `StepsOnIterator` does outside of the graph.

    Attributes:
        begin: Called before the steps.
        compare: Takes what the first step of an iteration returned for it.
        end: Takes what the last step returned, returns the logs.
    """

    begin: Callable[[], None]
    compare: Callable[[Any], None]
    end: Callable[[Any], Any]


@final
class StepsOnIterator:
    """``train_function`` or ``test_function``: does one step, or several, and returns the logs.

    Attributes:
        count: How many steps a call does, at most.
    """

    def __init__(self, step: Step, steps: int, around: Around, *, eagerly: bool) -> None:
        """Prepares the function; it is compiled when it is called.

        Args:
            step: Takes a batch, returns what `around` takes: for `compare`, and for `end`.
            steps: How many steps a call does, at most.
            around: What is done outside of the graph.
            eagerly: Whether not to compile.
        """
        self.count = steps
        self._around = around
        self._last: Callable[[], Any] = lambda: None
        self._on_batch = compiled(step, eagerly=eagerly)
        if eagerly:
            self._on_iterator = self._eagerly
        elif steps == 1:
            self._on_iterator = compiled(lambda it: step(it.get_next()), eagerly=False)
        else:
            self._on_iterator = compiled(self._in_a_loop, eagerly=False)

    def __call__(self, iterator: Any) -> Any:
        """Does the steps.

        Args:
            iterator: A ``tf.data.Iterator`` of global batches, or any other iterator of batches.

        Returns:
            The logs of the last step.

        Raises:
            OutOfRangeError: If there is no batch left.
        """
        self._around.begin()
        with division_errors():
            first, done = self._done(iterator)
            if isinstance(iterator, tf.data.Iterator) and iterator is not self._last():
                self._last = weakref.ref(iterator)
                self._around.compare(first)
            return self._around.end(done)

    def _done(self, iterator: Any) -> Any:
        if isinstance(iterator, tf.data.Iterator):
            return self._on_iterator(iterator)
        done = None
        for _, batch in zip(range(self.count), iterator, strict=False):
            done = self._on_batch(as_tensors(batch))
        if done is None:
            raise tf.errors.OutOfRangeError(None, None, "End of the data")
        return done

    def _eagerly(self, iterator: Any) -> Any:
        first, done = self._on_batch(iterator.get_next())
        for _ in range(self.count - 1):
            batch = iterator.get_next_as_optional()
            if not batch.has_value():
                break
            _, done = self._on_batch(batch.get_value())
        return first, done

    def _in_a_loop(self, iterator: Any) -> Any:
        """The steps of one call as a loop in the graph, which ends where the data ends."""
        first, logs = self._on_batch(iterator.get_next())

        def another(_: Any, more: Any, __: Any) -> Any:
            return more

        def body(done: Any, _: Any, logs: Any) -> Any:
            batch = iterator.get_next_as_optional()
            has_value = batch.has_value()
            logs = tf.cond(has_value, lambda: self._on_batch(batch.get_value())[1], lambda: logs)
            return done + 1, has_value & (done + 1 < self.count), logs

        *_, logs = tf.while_loop(another, body, (tf.constant(1), tf.constant(True), logs))
        return first, logs


@final
class PredictionOnBatches:
    """``predict_function``: the outputs for a list of global batches, one after another."""

    def __init__(
        self,
        build: Callable[[Any], None],
        step: Step,
        *,
        begin: Callable[[Any], None],
        eagerly: bool,
    ) -> None:
        """Prepares the function; it is compiled when it is called.

        Args:
            build: Takes the first batch, and makes what the step needs.
            step: Takes a batch, returns the outputs.
            begin: Called before the steps of a call, with the first one's batch.
            eagerly: Whether not to compile.
        """
        self._build = build
        self._is_built = False
        self._begin = begin
        self._step = compiled(step, eagerly=eagerly)

    def __call__(self, batches: Sequence[Any]) -> Any:
        """Predicts.

        Args:
            batches: Global batches, at least one.

        Returns:
            The outputs for all of them together.
        """
        if not self._is_built:
            self._build(batches[0])
            self._is_built = True
        self._begin(batches[0])
        with division_errors():
            outputs = [self._step(as_tensors(batch)) for batch in batches]
        return outputs[0] if len(outputs) == 1 else concatenated(outputs)


def as_tensors(batch: Any) -> Any:
    """Returns a batch with arrays made tensors, so that a new size does not compile a new step.

    Args:
        batch: Arrays, tensors or None in any structure.
    """

    def tensor(leaf: Any) -> Any:
        if leaf is None or tf.is_tensor(leaf) or isinstance(leaf, tf.experimental.Optional):
            return leaf
        return tf.convert_to_tensor(leaf)

    return keras.tree.map_structure(tensor, batch)


def concatenated(outputs: Iterable[Any]) -> Any:
    """Returns outputs in any structure one after another, along axis 0.

    Args:
        outputs: The same structure of tensors, several times.
    """
    return keras.tree.map_structure(lambda *parts: _concat(parts), *outputs)


def _concat(parts: Sequence[Any]) -> Any:
    if parts[0] is None:
        return None
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, parts)
    if parts[0].shape.rank == 0:
        return tf.stack(parts)
    return tf.concat(parts, 0)


def outputs_of_replicas(group: Group, outputs: Sequence[Any], shares: Sequence[BatchShare]) -> Any:
    """Puts together what the replicas predicted.

    Args:
        group: All replicas.
        outputs: The same structure of tensors from each replica of this process.
        shares: Each one's share of the batch.

    Returns:
        The rows of the global batch; for a scalar the mean over its examples.
    """

    def together(*parts: Any) -> Any:
        if parts[0] is None:
            return None
        if parts[0].shape.rank != 0:
            return group.concatenation(list(map(counted_rows, parts, shares)), 0)[0]
        weights = [share.weight for share in shares]
        everyone = group.everyones(list(zip(parts, weights, strict=True)))
        values, all_weights = zip(*everyone, strict=True)
        return global_logs(values, [{}] * len(values), {}, all_weights)

    return keras.tree.map_structure(together, *outputs)
