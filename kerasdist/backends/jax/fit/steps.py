"""The functions that Keras's loop calls: each call runs an execution of one or more steps."""

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


@final
class StepFunction:
    """A function that Keras calls with state and iterator, and that returns outputs and state.

    If steps are compiled, and an execution has all its batches, of equal shapes, the steps are one
    program; a smaller last batch has a program of its own. Otherwise each step runs by itself.
    """

    def __init__(
        self, model: Any, step: Step, arrays: Placement, *, keeps_outputs: bool = False
    ) -> None:
        """Makes the function, which compiles nothing before it is called.

        Args:
            model: The Keras model, which says how many steps an execution has, and whether they
                are compiled or run operation by operation.
            step: A step, which is a function of state and batch.
            arrays: The placement on which the step runs.
            keeps_outputs: Whether an execution returns the outputs of all its steps, one after
                another, and not only those of the last step.

        Attributes:
            compiled: The step as programs.
        """
        self._arrays = arrays
        self._steps: int = model.steps_per_execution
        self._keeps_outputs = keeps_outputs
        self._model = model
        self._user_step = step
        self.compiled = CompiledStep(arrays, self._sharded_step, keeps_rows=keeps_outputs)
        self._step: Step = self.compiled
        self._loop: Step | None = None
        if model.run_eagerly or not model.jit_compile:
            self._step = arrays.eager(self._whole_step)
        elif self._steps > 1:
            self._loop = CompiledStep(
                arrays, self._sharded_step, keeps_rows=keeps_outputs, in_loop=True
            )

    def __call__(self, state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Runs one execution; returns the outputs and the new state."""
        batches: Iterable[object] = itertools.islice(iterator, self._steps)
        outputs: list[object] = []
        if self._loop is not None:
            taken = list(map(self._arrays.copy_batch, batches))
            outputs, state, batches = self._take_in_loop(self._loop, state, taken)
        for batch in batches:
            output, state = self._step(state, self._arrays.batch(batch))
            self._arrays.after_launch(output, state)
            outputs.append(output)
        if not outputs:
            raise StopIteration
        if len(outputs) == 1 or not self._keeps_outputs:
            return outputs[-1], state
        return jax.tree.map(lambda *parts: np.concatenate(parts), *outputs), state

    def _take_in_loop(
        self, loop: Step, state: object, batches: Sequence[object]
    ) -> tuple[list[object], object, Sequence[object]]:
        """Runs the steps that can be one program; returns outputs, state and remaining batches."""
        count = _count_alike(batches)
        # Fewer batches run step by step, because each number of batches needs its own program.
        if len(batches) < self._steps or count < max(self._steps - 1, 2):
            return [], state, batches
        try:
            outputs, state = loop(state, [self._arrays.batch(one) for one in batches[:count]])
        except OtherStateError:
            self._loop = None
            return [], state, batches
        self._arrays.after_launch(outputs, state, count)
        return outputs if self._keeps_outputs else [outputs], state, batches[count:]

    # JAX traces the following methods, or runs them operation by operation.

    def _whole_step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        # Keras keeps the ids of losses, also of deleted tracers. A new loss with the id of a
        # deleted one would be counted twice or not at all.
        for layer in [self._model, *keras_compat.flat_layers(self._model)]:
            keras_compat.loss_ids_on(layer).clear()
        # A step has the rows of the global batch, so it runs as one replica, even in a scope.
        alone = context.default_strategy().sole_replica_context
        with context.replica_scope(alone), context.whole_step(vars(self._model)[TRAINER].strategy):
            return self._user_step(state, batch)

    def _sharded_step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        return self._whole_step(state, self._arrays.shard_batch(batch))


def _count_alike(batches: Sequence[object]) -> int:
    """Returns how many of the first batches equal the first one in structure, shapes and types.

    Returns 0 if an array cannot be stacked: a sparse array, or keys of random generators.
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
