"""The functions that `fit`, `evaluate` and `predict` call to run one or more steps at a time."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, final

import jax
import numpy as np

from kerasdist import keras_compat
from kerasdist.backends.base.model_trainer import TRAINER
from kerasdist.backends.jax.mesh.arrays import is_array
from kerasdist.backends.jax.mesh.placement import CompiledStep, OtherStateError, Placement, Step
from kerasdist.core import context
from kerasdist.core.structures import flatten

# The lists of a model's variables whose values a training step takes and returns.
TRAIN_STATE = (
    "trainable_variables",
    "non_trainable_variables",
    "optimizer_variables",
    "metrics_variables",
)


@final
class StepFunction:
    """A function that Keras calls with the state and batches, and that returns outputs and state.

    The steps of an execution run as one program if they are compiled, if the data have a batch for
    each step, and if the batches have equal shapes. If only the last batch is smaller, its step has
    a program of its own. In all other cases each step runs by itself.

    Attributes:
        compiled: The compiled programs of the step.
    """

    def __init__(
        self, model: Any, step: Step, arrays: Placement, *, keeps_outputs: bool = False
    ) -> None:
        """Makes the function, which compiles nothing before it is called.

        Args:
            model: The Keras model, which says how many steps an execution has, and whether they
                are compiled or run operation by operation.
            step: A step, which is a function of state and batch.
            arrays: The placement, which puts the state and the batches on the devices.
            keeps_outputs: Whether an execution returns the concatenated outputs of all its steps,
                as `predict` needs them, and not only the outputs of the last step.
        """
        self._arrays = arrays
        self._steps: int = model.steps_per_execution
        self._keeps_outputs = keeps_outputs
        self._model = model
        self._user_step = step
        self.compiled = CompiledStep(arrays, self._sharded_step, keeps_rows=keeps_outputs)
        is_compiled = model.jit_compile and not model.run_eagerly
        self._take = self.compiled if is_compiled else arrays.eager(self._whole_step)
        self._loops = is_compiled and self._steps > 1

    def __call__(self, state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Runs one execution; returns the outputs and the new state."""
        batches: Iterable[object] = itertools.islice(iterator, self._steps)
        outputs: list[object] = []
        if self._loops:
            taken = list(map(self._arrays.copy_batch, batches))
            outputs, state, batches = self._take_in_loop(state, taken)
        for batch in batches:
            last, state = self._take(state, [self._arrays.batch(batch)])
            self._arrays.after_launch(last, state)
            outputs += last
        if not outputs:
            raise StopIteration
        if len(outputs) == 1 or not self._keeps_outputs:
            return outputs[-1], state
        return jax.tree.map(lambda *parts: np.concatenate(parts), *outputs), state

    def _take_in_loop(
        self, state: object, batches: Sequence[object]
    ) -> tuple[list[object], object, Sequence[object]]:
        """Runs the steps that can be one program; returns outputs, state and remaining batches."""
        count = _count_alike(batches)
        # If too few batches are alike, the steps run one by one. A loop over fewer batches would
        # need a program of its own.
        if len(batches) < self._steps or count < max(self._steps - 1, 2):
            return [], state, batches
        try:
            outputs, state = self._take(state, list(map(self._arrays.batch, batches[:count])))
        except OtherStateError:
            self._loops = False
            return [], state, batches
        self._arrays.after_launch(outputs, state, count)
        return outputs, state, batches[count:]

    # JAX traces the following methods, or runs them operation by operation.

    def _whole_step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        # Keras keeps the ids of losses, even of tracers that were deleted since. If a new loss got
        # the id of a deleted one, the new loss would be counted twice or not at all.
        for layer in [self._model, *keras_compat.flat_layers(self._model)]:
            keras_compat.loss_ids_on(layer).clear()
        # A step has all rows of the global batch, so it runs as a single replica, even if it is
        # called in the scope of a strategy with several replicas.
        alone = context.default_strategy().sole_replica_context
        with context.replica_scope(alone), context.whole_step(vars(self._model)[TRAINER].strategy):
            return self._user_step(state, batch)

    def _sharded_step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        return self._whole_step(state, self._arrays.shard_batch(batch))


def _count_alike(batches: Sequence[object]) -> int:
    """Returns how many batches at the beginning are equal in structure, shapes and types.

    Returns 0 if the first batch has an array that cannot be stacked, such as a sparse array or an
    array of JAX's random keys.
    """
    forms = map(_form, batches)
    first = next(forms, None)
    alike = itertools.takewhile(lambda form: form == first, forms)
    return 0 if first is None else 1 + len(list(alike))


def _form(batch: object) -> Hashable:
    leaves = [leaf for leaf in flatten(batch) if leaf is not None]
    if not all(is_array(leaf) and isinstance(leaf.dtype, np.dtype) for leaf in leaves):
        return None
    return jax.tree.structure(batch), *[(leaf.shape, leaf.dtype) for leaf in leaves]
