"""The functions that Keras's loop calls: each call runs one execution, of one or more steps."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax
import numpy as np
from jax import numpy as jnp

from kerasdist import keras_compat
from kerasdist.backends.jax.mesh.placement import Placement, Step
from kerasdist.core import context


@dataclass(frozen=True)
class Execution:
    """How a model's steps run.

    Attributes:
        compiled: Whether a step is compiled, or run operation by operation.
        steps: The number of steps in an execution.
        keeps_outputs: Whether an execution returns the outputs of all its steps, one after another,
            or those of the last.
    """

    compiled: bool
    steps: int
    keeps_outputs: bool = False


@final
class StepFunction:
    """A function with Keras's own signature: state and iterator in, outputs and state out."""

    def __init__(self, model: Any, step: Step, arrays: Placement, execution: Execution) -> None:
        """Makes the function; nothing is compiled before it is called."""
        self._arrays = arrays
        self._execution = execution
        self._model = model
        self._user_step = step
        compiled = partial(arrays.compile, keeps_rows=execution.keeps_outputs)
        self._step: Step = (
            compiled(self._sharded_step) if execution.compiled else arrays.eager(self._whole_step)
        )
        self._loop: Step = compiled(self._scanned_steps, axis=1)

    def __call__(self, state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Runs one execution. Returns the outputs, and the new state."""
        if self._execution.steps == 1:
            return self._run(self._step, state, self._arrays.batch(next(iterator)))
        batches = [self._arrays.batch(b) for b in itertools.islice(iterator, self._execution.steps)]
        if not batches:
            raise StopIteration
        outputs = []
        for run in self._runs(batches):
            if len(run) == 1:
                part, state = self._run(self._step, state, run[0])
            else:
                part, state = self._run(self._loop, state, self._stack(run))
            outputs.append(part)
        return self._combined(outputs), state

    def program(self, state: Any, batch: Any) -> Any:
        """Returns the jitted program of an execution, for arrays of these shapes.

        Args:
            state: The state, or its shapes.
            batch: A batch, or its shapes; if an execution has several steps, a stack of batches.
        """
        if self._execution.steps == 1:
            return self._arrays.program(self._sharded_step, state, batch)
        return self._arrays.program(self._scanned_steps, state, batch, axis=1)

    def _run(self, step: Step, state: Any, batch: Any) -> tuple[Any, Any]:
        outputs, state = step(state, batch)
        self._arrays.after_launch(outputs, state)
        return outputs, state

    def _runs(self, batches: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """Yields the batches in order, in groups that one compiled loop can take."""
        if not self._execution.compiled:
            yield from ([batch] for batch in batches)
            return
        for _, run in itertools.groupby(batches, _form):
            yield list(run)

    def _stack(self, run: Sequence[Any]) -> Any:
        if not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(run)):
            return jax.tree.map(lambda *leaves: np.stack(leaves), *run)
        return self._arrays.stack(run)

    def _combined(self, outputs: list[Any]) -> Any:
        if len(outputs) == 1 or not self._execution.keeps_outputs:
            return outputs[-1]
        return jax.tree.map(lambda *parts: np.concatenate(parts), *outputs)

    # JAX traces the methods below, or runs them operation by operation.

    def _whole_step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        # Keras keeps the ids of deleted tracers. A new loss may get the id of one of an earlier
        # trace, and would be counted twice, or not at all.
        for layer in [self._model, *keras_compat.flat_layers(self._model)]:
            keras_compat.loss_ids_on(layer).clear()
        # A step is written for the global batch, so it runs as one replica in any open scope.
        with context.replica_scope(context.default_strategy().sole_replica_context()):
            return self._user_step(state, batch)

    def _sharded_step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        return self._whole_step(state, self._arrays.shard_batch(batch))

    def _scanned_steps(self, state: Any, batches: Any) -> tuple[Any, Any]:
        def body(state: object, batch: object) -> tuple[Any, Any]:
            outputs, new_state = self._sharded_step(state, batch)
            return _in_form_of(state, new_state), outputs

        state, outputs = jax.lax.scan(body, state, batches)
        if self._execution.keeps_outputs:
            return jax.tree.map(_joined, outputs), state
        return jax.tree.map(lambda leaf: leaf[-1], outputs), state


def _form(batch: object) -> Hashable:
    """Returns the structure, shapes and types that batches must share to be stacked."""
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple((np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)


def _joined(outputs: Any) -> Any:
    """Returns the outputs of several steps, one row per step, as if of one step."""
    return outputs.reshape(-1, *outputs.shape[2:]) if outputs.ndim > 1 else outputs


def _in_form_of(old: object, new: object) -> Any:
    """Gives a new state the containers and types of the old one, as the next step needs."""
    old_leaves, structure = jax.tree.flatten(old)
    pairs = zip(jax.tree.leaves(new), old_leaves, strict=True)
    return jax.tree.unflatten(structure, [jnp.asarray(leaf, like.dtype) for leaf, like in pairs])
