"""Tries a training step as a program on one device, and on the mesh, on JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import jax
import jax.numpy as jnp
import keras
import numpy as np

from kerasdist import keras_compat
from kerasdist.backends.jax import donation
from kerasdist.backends.jax.steps import Execution, StepFunction
from kerasdist.backends.trial import Draw, Trial
from kerasdist.input.sharding import rows

# The parts of the state that Keras's step takes and returns, in order.
STATE = (
    "trainable_variables",
    "non_trainable_variables",
    "optimizer_variables",
    "metrics_variables",
)


@final
class JaxTrial(Trial):
    """Takes steps that are functions of the state, and do not write the variables themselves.

    Random draws need no replacement, since both programs draw the same numbers. The outputs of
    layers cannot be recorded, since they are traced.
    """

    sees_inside = False

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._kept: dict[int, tuple[Any, Any]] = {}
        self._is_divided = False
        self._change = 0.0
        self._after: Any = None

    def __enter__(self) -> JaxTrial:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()
        self._kept.clear()

    def draw_alike(self) -> None:
        """Does nothing: draws depend only on the state that the step gets."""

    def first_rows(self, batch: Any, count: int) -> Any:
        """Returns the first rows of a batch, as slices of its arrays."""
        return rows(batch, 0, count)

    def keep(self, variables: Iterable[Any]) -> None:
        """Keeps the variables' arrays, which are immutable, and prevents their donation."""
        for variable in variables:
            donation.mark_read(variable)
            self._kept.setdefault(id(variable), (variable, keras_compat.stored_value(variable)))

    def restore(self) -> None:
        """Gives the variables the arrays that they had."""
        for variable, value in self._kept.values():
            keras_compat.store_value(variable, value)

    def ready(self, optimizer: Any, variables: Sequence[Any] | None) -> None:
        """Does nothing: the step gets the optimizer's state as an argument."""
        del optimizer, variables

    def take(self, batch: Any) -> Any:
        """Takes the step as a program on one device, or as `fit` does."""
        model = self._model
        state = jax.tree.map(jnp.copy, model._get_jax_state(**dict.fromkeys(STATE, True)))
        if self._is_divided:
            execution = Execution(compiled=True, steps=1)
            run = StepFunction(model.train_step, model.replica_set.arrays, execution)
            logs, after = run(state, iter([batch]))
            self._after = model.replica_set.arrays.wholly(after)
            return logs
        first = model.replica_set.devices[0]
        device = jax.local_devices(backend=first.kind)[first.index]
        trained, *others = jax.tree.map(np.asarray, model.replica_set.arrays.wholly(state))
        numbers = np.random.default_rng(0)
        trained = [self._changed(value, numbers) for value in trained]
        placed = jax.device_put(((trained, *others), batch), device)
        logs, self._after = jax.jit(model.train_step)(*placed)
        return logs

    def alone(
        self, step: Callable[[Any], Any], batch: Any, look: Callable[[], Any], change: float
    ) -> tuple[Any, Any]:
        """Takes the step with the state on one device."""
        self._is_divided, self._change = False, change
        return self._seen(step, batch, look)

    def divided(
        self, step: Callable[[Any], Any], batch: Any, look: Callable[[], Any]
    ) -> tuple[Any, Any]:
        """Takes the step with the state on the mesh."""
        self._is_divided = True
        with self._model.replica_set.placement():
            return self._seen(step, batch, look)

    def _seen(
        self, step: Callable[[Any], Any], batch: Any, look: Callable[[], Any]
    ) -> tuple[Any, Any]:
        logs = step(batch)
        model = self._model
        variables = [getattr(model, name) for name in STATE if name != "optimizer_variables"]
        values = [self._after[index] for index in (0, 1, 3)]
        pairs = zip(jax.tree.leaves(variables), jax.tree.leaves(values), strict=True)
        with keras.StatelessScope(list(pairs)):
            return logs, look()

    def _changed(self, value: Any, numbers: np.random.Generator) -> Any:
        if not self._change or not jnp.issubdtype(value.dtype, jnp.floating):
            return value
        change = 1.0 + numbers.uniform(-self._change, self._change, value.shape)
        return (value * change).astype(value.dtype)

    def drawing(self, draw: Draw) -> AbstractContextManager[Any]:
        """Does nothing: one device and the mesh draw the same numbers."""
        del draw
        return nullcontext()

    def as_array(self, value: Any) -> Any:
        """Returns an array as a NumPy array."""
        found = np.asarray(value)
        return found.astype("float32") if found.dtype == jnp.bfloat16 else found
