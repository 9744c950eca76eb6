"""The functions that Keras's loop calls: each call runs one execution, of one or more steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, final

import jax
import numpy as np

from kerasdist import keras_compat
from kerasdist.backends.jax.mesh.placement import Placement, Step
from kerasdist.core import context


@final
class StepFunction:
    """A function with Keras's own signature: state and iterator in, outputs and state out."""

    def __init__(
        self,
        model: Any,
        step: Step,
        arrays: Placement,
        *,
        compiled: bool = True,
        steps: int = 1,
        keeps_outputs: bool = False,
    ) -> None:
        """Makes the function; nothing is compiled before it is called.

        Args:
            model: The model.
            step: A step, of state and batch.
            arrays: Where it runs.
            compiled: Whether a step is compiled, or run operation by operation.
            steps: The number of steps in an execution.
            keeps_outputs: Whether an execution returns the outputs of all its steps, one after
                another, or those of the last.
        """
        self._arrays = arrays
        self._steps = steps
        self._keeps_outputs = keeps_outputs
        self._model = model
        self._user_step = step
        self._step: Step = (
            arrays.compile(self._sharded_step, keeps_rows=keeps_outputs)
            if compiled
            else arrays.eager(self._whole_step)
        )

    def __call__(self, state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Runs one execution. Returns the outputs, and the new state."""
        outputs: list[Any] = []
        for batch in itertools.islice(iterator, self._steps):
            output, state = self._step(state, self._arrays.batch(batch))
            self._arrays.after_launch(output, state)
            outputs.append(output)
        if not outputs:
            raise StopIteration
        if len(outputs) == 1 or not self._keeps_outputs:
            return outputs[-1], state
        return jax.tree.map(lambda *parts: np.concatenate(parts), *outputs), state

    def program(self, state: Any, batch: Any) -> Any:
        """Returns the jitted program of a step, for arrays of these shapes."""
        return self._arrays.program(self._sharded_step, state, batch)

    # JAX traces the methods below, or runs them operation by operation.

    def _whole_step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        # Keras keeps the ids of deleted tracers. A new loss may get the id of one of an earlier
        # trace, and would be counted twice, or not at all.
        for layer in [self._model, *keras_compat.flat_layers(self._model)]:
            keras_compat.loss_ids_on(layer).clear()
        # A step is written for the global batch, so it runs as one replica in any open scope.
        with context.replica_scope(context.default_strategy().sole_replica_context):
            return self._user_step(state, batch)

    def _sharded_step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        return self._whole_step(state, self._arrays.shard_batch(batch))
