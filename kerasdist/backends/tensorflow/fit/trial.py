"""Runs a training step eagerly, on one device and on the replicas, to compare the results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, final

import keras
import numpy as np
import tensorflow as tf

from kerasdist import keras_compat
from kerasdist.backends.base.trial import MemoryTrial, Trial, TriedBatch
from kerasdist.backends.base.variable_rules import is_sum_on_read
from kerasdist.backends.tensorflow.fit.batches import (
    HOST,
    OwnRows,
    counted_rows,
    first_rows,
    none_for_optional,
)
from kerasdist.backends.tensorflow.private.scopes import outside_strategies
from kerasdist.backends.tensorflow.private.strategies import (
    SharedSum,
    is_distributed,
    plain_copy,
    replicated_copy,
)
from kerasdist.backends.tensorflow.replica.variables import copies
from kerasdist.core.context import current
from kerasdist.errors import ShapeError
from kerasdist.input import sharding


def _draw(original: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Draws random numbers; in a trial, leaves the choice of the numbers to the trial's `draws`."""
    trial = current.trial
    if trial is None:
        return original(*args, **kwargs)
    given = args[0] if args else next(iter(kwargs.values()), None)
    return trial.draws.draw(original.__name__, lambda: original(*args, **kwargs), given)


# Only trials need the hook, so it is installed when a program first imports this module.
keras_compat.install(draw=_draw)


class TensorFlowTrial(Trial):
    """A trial on TensorFlow, which runs a step eagerly.

    The copies of variables are plain ``tf.Variable``s for a step on one device, and distributed
    variables for a step on the replicas.
    """

    @staticmethod
    def first_rows(batch: Any, count: int) -> Any:
        """Returns the first `count` rows of each tensor, also of sparse and ragged tensors."""
        return first_rows(batch, count)

    @classmethod
    def gathered(cls, replicas: Any, batch: Any, *, spares: bool) -> TriedBatch:
        """Returns a batch with the rows of all workers."""
        job, group = replicas.job, replicas.group
        if job is None or not isinstance(batch, OwnRows):  # without a job, a process has all rows
            rows = batch.rows if isinstance(batch, OwnRows) else batch
            return super().gathered(replicas, rows, spares=spares)
        own = [int(local.size) for local in group.split(batch)], _form(batch.rows)
        everyone = job.all_gather_object("rows of the first batch", own)
        sizes = tuple(size for theirs, _ in everyone for size in theirs)
        forms = [form for _, form in everyone]
        if any(form != forms[0] for form in forms):
            # A collective of tensors of different sizes would wait forever.
            raise ShapeError(
                "Expected the batches of all workers to differ only in their number of rows, to "
                f"concatenate them. Received: {forms}, by worker. Pad them to one shape."
            )
        if spares and sharding.trial_sizes(sizes) != sizes:
            sizes = sharding.trial_sizes(sizes)
            here = sum(sizes[group.local.start : group.local.stop])
            # Each worker keeps at least one row, because an `OwnRows` without rows that count has
            # a stand-in row.
            rows = first_rows(batch.rows, max(here, 1))
            batch = OwnRows(rows, here, sum(sizes))
        local_rows = group.split(batch)

        def whole(*parts: Any) -> Any:
            if parts[0] is None or parts[0].shape.rank == 0:
                return parts[0]
            counted = [
                counted_rows(part, local.size)
                for part, local in zip(parts, local_rows, strict=True)
            ]
            return group.concatenation(counted, 0)[0]

        with replicas.placement(), tf.device(HOST):
            rows = keras.tree.map_structure(whole, *(local.rows for local in local_rows))
        return TriedBatch(batch, rows, sizes)

    @contextmanager
    def own_state_kept(self) -> Generator[None]:
        """Restores the model's own ``tf.Variable``s and generators when the block ends."""
        generators = keras_compat.held_by(self._model, tf.random.Generator)
        held = [*keras_compat.held_by(self._model, tf.Variable), *(one.state for one in generators)]
        parts = [part for one in held for part in copies(one)]
        before = [part.read_value() for part in parts]
        try:
            yield
        finally:
            for part, value in zip(parts, before, strict=True):
                part.assign(value)

    def copy(self, variable: Any) -> Any:
        """Returns a new TensorFlow variable with the value of a Keras variable."""
        own = keras_compat.stored_value(variable)
        if own is None:
            return None
        with tf.init_scope(), outside_strategies():
            if self._alone:
                return plain_copy(copies(own)[0], _whole(variable, own))
            if is_distributed(own):
                return replicated_copy(own)
            with tf.device(own.device):
                return plain_copy(own, own.read_value())

    def write(self, variable: keras.Variable, value: Any) -> None:
        """Assigns to the copy of a variable. The values of replicas are combined as in `fit`."""
        replica = current.replica
        if replica is None:
            self._assign(variable, value)
        else:
            replica.collectives.assign(variable, value, self._assign)

    def _assign(self, variable: keras.Variable, value: Any) -> None:
        own = self.get_current_value(variable)
        own.assign(tf.cast(value, own.dtype))

    def stand_in(self, optimizer: Any) -> Any:
        """Returns the optimizer; on one device, a copy of it that updates plain variables."""
        if not self._alone:
            return optimizer
        return keras_compat.copy_of_optimizer(optimizer, tf.distribute.get_strategy())

    def take(self, batch: TriedBatch) -> Any:
        """Runs the step on the first device, or on the replicas as with ``run_eagerly=True``."""
        step, first = self._model.train_step, self._replicas.devices[0]
        with _eager_functions():  # compiled functions would keep the trial's copies of variables
            if not self._alone:
                with self._replicas.placement():
                    return self._trainer.step_on_replicas(step, batch.given)
            with outside_strategies(), tf.device(f"/device:{first.kind.upper()}:{first.index}"):
                return step(keras.tree.map_structure(none_for_optional, batch.whole))

    @staticmethod
    def as_array(value: Any) -> Any:
        """Returns a tensor as a NumPy array; an empty array if the tensor is symbolic."""
        first = copies(value)[0]
        if isinstance(first, tf.Variable):  # NumPy warns if it converts a variable itself
            first = first.read_value()
        parts = tf.nest.flatten(first, expand_composites=True)
        return np.empty(0) if any(map(tf.is_symbolic_tensor, parts)) else Trial.as_array(first)


@final
class TensorFlowMemoryTrial(MemoryTrial, TensorFlowTrial):
    """A `MemoryTrial` whose step reads the first device's copies of variables."""

    def copy(self, variable: Any) -> Any:
        """Returns a variable's component on the first device, without copying it.

        No copy is needed, because the step of a `MemoryTrial` updates no variable.
        """
        own = keras_compat.stored_value(variable)
        return None if own is None else copies(own)[0]


_lock = threading.Lock()
# For each trial that runs now, in any thread: whether functions ran eagerly when it began.
_before: list[bool] = []


@contextmanager
def _eager_functions() -> Generator[None]:
    """Makes every ``tf.function`` in the process run eagerly until all threads' trials end."""
    with _lock:
        _before.append(tf.config.functions_run_eagerly())
        tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        with _lock:
            # Functions stay eager as long as another trial runs. The trial that ends last pops
            # the first entry, which has the user's setting from before all of these trials.
            tf.config.run_functions_eagerly(_before.pop() or bool(_before))


def _whole(variable: Any, own: Any) -> Any:
    """Returns the value that a variable would have on one device."""
    parts = [one.read_value() for one in copies(own)]
    if isinstance(own, SharedSum) and not own.is_whole_here and own.known is not None:
        return own.known
    return tf.add_n(parts) if is_sum_on_read(variable) and len(parts) > 1 else parts[0]


def _form(rows: object) -> list[str]:
    """Returns the types and shapes of a batch's arrays; the shapes leave out the axis of rows."""
    leaves = [leaf for leaf in map(none_for_optional, keras.tree.flatten(rows)) if leaf is not None]
    return [f"{leaf.dtype.name} {leaf.shape[1:] if leaf.shape.rank else ()}" for leaf in leaves]
