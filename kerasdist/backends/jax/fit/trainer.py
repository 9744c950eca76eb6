"""Runs Keras's JAX trainer on a mesh: replaces its step functions, and places its state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, final

import jax
import keras

from kerasdist import keras_compat
from kerasdist.backends.base import metering
from kerasdist.backends.jax.fit import donation, passes
from kerasdist.backends.jax.fit.steps import StepFunction
from kerasdist.backends.jax.internals import TRACER
from kerasdist.backends.jax.mesh.arrays import copied, here, is_traced
from kerasdist.backends.jax.mesh.layout import note_all
from kerasdist.core.context import current
from kerasdist.core.structures import Arguments
from kerasdist.errors import UnsupportedError
from kerasdist.training.metrics import prepare
from kerasdist.training.trainer import ReplicatedTrainer

if TYPE_CHECKING:
    from kerasdist.backends.base.interface import ReplicaSet
    from kerasdist.backends.jax.mesh.placement import Placement, Step

    class _Replicas(ReplicaSet):
        arrays: Placement


TRAIN_STATE = (
    "trainable_variables",
    "non_trainable_variables",
    "optimizer_variables",
    "metrics_variables",
)
_TEST_STATE = ("trainable_variables", "non_trainable_variables", "metrics_variables")
_PREDICT_STATE = ("trainable_variables", "non_trainable_variables")


@final
class JaxTrainer(ReplicatedTrainer):
    """Runs a model's steps as one program on the devices of its strategy."""

    if TYPE_CHECKING:
        replica_set: _Replicas

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Calls the model; Keras's `predict` does, on a batch of all workers, to build layers."""
        args, kwargs = jax.tree.map(_rows_here, (args, kwargs))
        return super().__call__(*args, **kwargs)

    def stateless_call(
        self, weights: Any, state: Any, *args: object, return_losses: bool = False, **kwargs: object
    ) -> Any:
        """Calls the model, in a step in passes where a device has more rows than it shall."""
        call = partial(super().stateless_call, weights, state)
        rows = passes.rows_of_passes(self, args, kwargs)
        if rows is None:
            return call(*args, return_losses=return_losses, **kwargs)
        outputs, losses = passes.calls(self, call, state, Arguments(args, kwargs), rows)
        return (outputs, state, losses) if return_losses else (outputs, state)

    def make_train_function(self, force: bool = False) -> None:
        """Makes the function that `fit` calls."""
        self._begin()
        if self.train_function is None or force:
            self.train_function = self._function(self.train_step, TRAIN_STATE, is_measured=True)

    def make_test_function(self, force: bool = False) -> None:
        """Makes the function that `evaluate` calls."""
        self._begin()
        if self.test_function is None or force:
            self.test_function = self._function(self.test_step, _TEST_STATE)

    def make_predict_function(self, force: bool = False) -> Callable[..., Any]:
        """Makes the function that `predict` calls, and returns it."""

        def predict_step(state: Any, batch: Any) -> tuple[Any, Any]:
            outputs, non_trainable_variables = self.predict_step(state, batch)
            return outputs, (state[0], non_trainable_variables)

        self._begin()
        if self.predict_function is None or force:
            self.predict_function = self._function(predict_step, _PREDICT_STATE, keeps_outputs=True)
        return self.predict_function

    def _symbolic_build(self, *args: object, **kwargs: object) -> None:
        self._begin()
        super()._symbolic_build(*args, **kwargs)

    def _begin(self) -> None:
        """Puts values back that the steps of an outer call, in this thread, have taken out."""
        TRACER.require()  # an error of its own, where Keras would wrap one from inside a step
        if not self._jax_state_synced and self._steps_thread != threading.get_ident():
            raise self._in_use()
        self.jax_state_sync()

    def _in_use(self) -> UnsupportedError:
        return UnsupportedError(
            "Expected one call of fit, evaluate or predict of a model at a time: on JAX its steps "
            f"take the values out of the variables. Received: model={self.name!r}, whose steps run "
            "in two threads. Give one thread a model of its own, and that the weights: "
            "other.set_weights(model.get_weights())."
        )

    def _function(
        self,
        step: Step,
        names: tuple[str, ...],
        *,
        keeps_outputs: bool = False,
        is_measured: bool = False,
    ) -> Callable[..., Any]:
        if self.replica_set.num_replicas > 1:
            prepare(self, self.bound_strategy)  # its metrics in a custom loop
        run = StepFunction(
            self,
            step,
            self.replica_set.arrays,
            compiled=self.jit_compile and not self.run_eagerly,
            steps=self.steps_per_execution,
            keeps_outputs=keeps_outputs,
        )

        def function(state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
            meter = current.meter if is_measured else None
            batches: Any = iterator if meter is None else metering.Counting(iterator)
            try:
                self.replica_set.begin_step()
                outputs, new = run(state, batches)
            except BaseException:
                # Keras has taken the values out of the variables for the time of the step. Whatever
                # went wrong, they go back, or a variable would start again from its initializer. A
                # step that failed on the devices, say for a lost worker, has consumed them already.
                if not any(value.is_deleted() for value in jax.tree.leaves(state)):
                    self._jax_state = dict(zip(names, state, strict=True))
                    self.jax_state_sync()
                raise
            if meter is not None:
                meter.done(batches.count, batches.rows, outputs)
            return outputs, new

        return function

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; those of the steps bypass Keras's tracking, which would search it."""
        if name in ("_jax_state", "_steps_thread"):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def _get_jax_state(
        self, *, purge_model_variables: bool = False, **which: bool
    ) -> tuple[Any, ...]:
        # Keras calls this at the start, and when a callback may have changed variables in between.
        if self.replica_set.job is not None:
            self.replica_set.initial_broadcast.ensure()
        model: Any = self
        variables: dict[str, list[Any]] = {}
        for name in TRAIN_STATE:  # in Keras's order
            if name == "optimizer_variables" and which.get(name):
                if self.replica_set.arrays.layout.shards_state:
                    note_all(model.optimizer, model.trainable_variables)
                variables[name] = list(model.optimizer.variables)
            elif which.get(name):
                variables[name] = list(getattr(model, name))
        # Keras's own method reads variables as users do, who get whole values of sharded ones.
        values = tuple(map(keras_compat.stored_values, variables.values()))
        if any(one is None for several in values for one in several):
            raise self._in_use()
        state = self.replica_set.arrays.state(values, tuple(variables.values()))
        if purge_model_variables:
            self._jax_state = dict(zip(variables, state, strict=True))
            self._steps_thread = threading.get_ident()
            for name, several in variables.items():
                donation.mark_in_steps(several, self._copy_in_steps, name)
            self._purge_model_variables(**which)
        return state

    def _copy_in_steps(self, variable: keras.Variable, name: str, index: int) -> Any:
        """Copies a value that Keras's loop, in any thread, takes out; None while it cannot."""
        with donation.launching:
            stored, state = keras_compat.stored_value(variable), self._jax_state
            if stored is not None and not stored.is_deleted():
                return copied(here(stored))
            if state is None or state[name][index].is_deleted():
                return None
            return copied(here(state[name][index]))


def _rows_here(leaf: Any) -> Any:
    is_global = (
        isinstance(leaf, jax.Array) and not is_traced(leaf) and not leaf.is_fully_addressable
    )
    return leaf.addressable_data(0) if is_global else leaf
