"""Runs a JAX training step on one device and on the mesh, so that the results can be compared."""

from __future__ import annotations

from typing import Any, final

import jax
import keras
import numpy as np

from kerasdist import keras_compat
from kerasdist.backends.base.trial import Trial, TriedBatch
from kerasdist.backends.jax.fit import donation
from kerasdist.backends.jax.fit.steps import TRAIN_STATE, StepFunction
from kerasdist.backends.jax.mesh.arrays import copied


@final
class JaxTrial(Trial):
    """A trial of a JAX step, which takes the variables' values as arguments.

    The program on one device and the program on the mesh draw the same random numbers. Gradients
    and outputs are not compared, because they are tracers.
    """

    def copy(self, variable: keras.Variable) -> Any:
        """Returns the variable's own array; no copy is needed, because the step cannot change it.

        From now on no program may consume the array.
        """
        donation.mark_read(variable)
        return keras_compat.held_value(variable)

    def write(self, variable: keras.Variable, value: Any) -> None:
        """Records the value that the step computed for a variable; leaves the variable as it is."""
        self._copies[id(variable)] = variable, value

    def value_of(self, variable: keras.Variable) -> Any:
        """Returns the full value that a variable has in the step. All workers must take part."""
        return self.as_array(self._replicas.arrays.read(keras_compat.stored_value(variable)))

    def take(self, batch: TriedBatch) -> Any:
        """Runs the step as a program on one device, or on the mesh as `fit` does."""
        model = self._model
        arrays = self._replicas.arrays
        state = keras_compat.internals.GET_JAX_STATE.of(model)(**dict.fromkeys(TRAIN_STATE, True))
        state = jax.tree.map(copied, state)
        with keras_compat.in_trial(None):
            if self._alone:
                first = self._replicas.devices[0]
                device = jax.local_devices(backend=first.kind)[first.index]
                whole = jax.tree.map(lambda one: np.asarray(arrays.read(one)), state)
                placed = jax.device_put((whole, batch.whole), device)
                logs, after = jax.jit(model.train_step)(*placed)
            else:
                with self._replicas.placement():
                    run = StepFunction(model, model.train_step, arrays)
                    logs, after = run(state, iter([batch.given]))
        variables = [getattr(model, name) for name in TRAIN_STATE if name != "optimizer_variables"]
        values = [after[index] for index in (0, 1, 3)]
        for pair in zip(jax.tree.leaves(variables), jax.tree.leaves(values), strict=True):
            self.write(*pair)
        return logs
