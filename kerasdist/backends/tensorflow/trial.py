"""Tries a training step on one device and on the replicas, both eagerly, on TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, final

import keras
import numpy as np
import tensorflow as tf

from kerasdist import keras_compat
from kerasdist.backends.tensorflow.batches import (
    HOST,
    OwnRows,
    counted_rows,
    first_rows,
    none_for_optional,
)
from kerasdist.backends.tensorflow.private.scopes import outside_strategies
from kerasdist.backends.tensorflow.private.trials import (
    RandomState,
    draws_replaced,
    plain_copy,
    without_advice,
)
from kerasdist.backends.tensorflow.private.worker_strategy import SharedSum
from kerasdist.backends.tensorflow.variables import copies
from kerasdist.backends.trial import Draw, Trial, TriedBatch
from kerasdist.backends.variable_rules import is_sum_on_read
from kerasdist.errors import ShapeError
from kerasdist.input import sharding

# The seed of all workers' random draws in a trial.
_SEED = 926_535_897


@final
class TensorFlowTrial(Trial):
    """Gives the step on one device plain variables, and restores what the replicas' step writes."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._replicas = model.replica_set
        # By id: the Keras variable, its native variable, the old values of the copies, and the
        # old value aggregated over all workers, if it is known.
        self._kept: dict[int, tuple[Any, Any, list[tf.Tensor], tf.Tensor | None]] = {}
        self._is_alone = False
        self._optimizers: dict[int, tuple[Any, Any]] = {}
        self._draw: Draw | None = None
        self._random = RandomState()
        self._open = ExitStack()

    def __enter__(self) -> TensorFlowTrial:
        self._random = RandomState()
        self._open.callback(self._random.restore)
        eagerly = tf.config.functions_run_eagerly()
        tf.config.run_functions_eagerly(True)
        self._open.callback(tf.config.run_functions_eagerly, eagerly)
        self._open.enter_context(draws_replaced(self._drawn))
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()
        self._kept.clear()
        self._open.close()

    def draw_alike(self) -> None:
        """Makes TensorFlow draw from a generator with a fixed seed until the trial ends."""
        self._random.replace(_SEED)

    def first_rows(self, batch: Any, count: int) -> Any:
        """Returns slices of the tensors, sparse and ragged ones too."""
        return first_rows(batch, count)

    def gathered(self, batch: Any, *, spares: bool) -> TriedBatch:
        """Returns a batch with the rows of all workers."""
        job = self._replicas.job
        if job is None or not isinstance(batch, OwnRows):
            return super().gathered(batch, spares=spares)
        group = self._replicas.group
        own = [int(piece.share.size) for piece in group.pieces(batch)], _form(batch.rows)
        everyone = job.all_gather_object("rows of the first batch", own)
        sizes = tuple(size for theirs, _ in everyone for size in theirs)
        forms = [form for _, form in everyone]
        if any(form != forms[0] for form in forms):
            # A collective of tensors of different sizes would wait forever.
            raise ShapeError(
                "Expected batches on all workers that differ in their number of rows alone, to put "
                f"them together. Received: {forms}, by worker. Pad them to one shape."
            )
        if spares and sharding.spared(sizes) != sizes:
            sizes = sharding.spared(sizes)
            here = sum(sizes[group.local.start : group.local.stop])
            rows = first_rows(batch.rows, max(here, 1))  # a worker without rows keeps a stand-in
            batch = OwnRows(rows, tf.constant(here), tf.constant(sum(sizes)))
        pieces = group.pieces(batch)

        def whole(*parts: Any) -> Any:
            if parts[0] is None or parts[0].shape.rank == 0:
                return parts[0]
            counted = [
                counted_rows(part, piece.share) for part, piece in zip(parts, pieces, strict=True)
            ]
            return group.concatenation(counted, 0)[0]

        with self._replicas.placement(), tf.device(HOST):
            rows = keras.tree.map_structure(whole, *(piece.data for piece in pieces))
        return TriedBatch(batch, rows, sizes)

    def keep(self, variables: Iterable[Any]) -> None:
        """Copies the values of those variables that are not kept yet."""
        for variable in variables:
            own = keras_compat.stored_value(variable)
            if own is None or id(variable) in self._kept:
                continue
            before = [tf.identity(one.read_value()) for one in copies(own)]
            divided = isinstance(own, SharedSum) and not own.is_whole_here
            known = own.known if divided else None
            self._kept[id(variable)] = (variable, own, before, known)
            if self._is_alone:
                self._replace(variable)

    def restore(self) -> None:
        """Copies the kept values back into the variables."""
        for _, own, before, known in self._kept.values():
            for copy, value in zip(copies(own), before, strict=True):
                copy.assign(value)
            if known is not None:
                own.remember(known)

    def ready(self, optimizer: Any, variables: Sequence[Any] | None) -> None:
        """Builds the optimizer in the scope; the step on one device detaches it from the scope."""
        if not optimizer.built and variables is not None:
            self._put_back()
            with self._replicas.placement(), keras.name_scope(optimizer.name):
                optimizer.build(variables)
            if self._is_alone:
                self._replace_all()
        self.keep(optimizer.variables)
        if self._is_alone and id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = (
                optimizer,
                keras_compat.move_optimizer(optimizer, tf.distribute.get_strategy()),
            )

    def alone(
        self, step: Callable[[Any], Any], batch: Any, look: Callable[[], Any], change: float
    ) -> tuple[Any, Any]:
        """Takes the step with plain variables in the place of the strategy's."""
        device = self._replicas.group.native_strategy.extended.worker_devices[0]
        with outside_strategies(), tf.device(device), self._with_plain_variables():
            if change:
                self._change(change)
            return step(keras.tree.map_structure(none_for_optional, batch)), look()

    def divided(
        self, step: Callable[[Any], Any], batch: Any, look: Callable[[], Any]
    ) -> tuple[Any, Any]:
        """Takes the step as `fit` does with ``run_eagerly=True``."""
        with self._replicas.placement(), without_advice():
            return self._model.step_on_replicas(step, batch), look()

    def drawing(self, draw: Draw) -> AbstractContextManager[Any]:
        """Calls `draw` in place of TensorFlow's random functions, in all threads."""
        self._draw = draw
        return nullcontext()

    def as_array(self, value: Any) -> Any:
        """Returns a tensor as a NumPy array; an empty one for a tensor of an inner graph."""
        value = copies(value)[0]
        if isinstance(value, tf.RaggedTensor):
            value = value.to_tensor()
        if isinstance(value, tf.SparseTensor):
            value = tf.sparse.to_dense(value)
        value = tf.convert_to_tensor(value)
        if tf.is_symbolic_tensor(value):
            return np.empty(0)
        return (tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value).numpy()

    def _drawn(self, name: str, draw: Callable[[], Any], given: Any) -> Any:
        return draw() if self._draw is None else self._draw(name, draw, given)

    @contextmanager
    def _with_plain_variables(self) -> Iterator[None]:
        self._is_alone = True
        self._replace_all()
        try:
            yield
        finally:
            self._is_alone = False
            self._put_back()
            for optimizer, native_strategy in self._optimizers.values():
                keras_compat.move_optimizer(optimizer, native_strategy)
            self._optimizers.clear()

    def _replace_all(self) -> None:
        for variable, *_ in self._kept.values():
            self._replace(variable)

    def _replace(self, variable: Any) -> None:
        _, own, before, known = self._kept[id(variable)]
        is_part = is_sum_on_read(variable)
        value = tf.add_n(before) if is_part and len(before) > 1 else before[0]
        value = value if known is None else known
        keras_compat.store_value(variable, plain_copy(own, value))

    def _put_back(self) -> None:
        for variable, own, *_ in self._kept.values():
            keras_compat.store_value(variable, own)

    def _change(self, part: float) -> None:
        numbers = np.random.default_rng(0)
        for variable in self._model.trainable_variables:
            if keras.backend.is_float_dtype(variable.dtype):
                change = 1.0 + numbers.uniform(-part, part, tuple(variable.shape))
                variable.assign(variable * tf.cast(change, variable.dtype))


def _form(rows: Any) -> list[str]:
    """The types and shapes of a batch, without its number of rows."""
    leaves = [leaf for leaf in map(none_for_optional, keras.tree.flatten(rows)) if leaf is not None]
    return [f"{leaf.dtype.name} {leaf.shape[1:] if leaf.shape.rank else ()}" for leaf in leaves]
