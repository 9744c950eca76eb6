"""Runs a model's steps on a mesh: makes the functions of `fit`, and places the state."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any, final

import jax
import keras

from kerasdist import config, keras_compat
from kerasdist.backends.base import metering
from kerasdist.backends.base.model_trainer import TRAINER
from kerasdist.backends.jax.fit import donation, passes
from kerasdist.backends.jax.fit.batches import take
from kerasdist.backends.jax.fit.steps import TRAIN_STATE, StepFunction
from kerasdist.backends.jax.mesh.arrays import copied, is_traced, local_copy
from kerasdist.backends.jax.mesh.layout import OverReplicas, note_all
from kerasdist.check import memory
from kerasdist.core.context import current
from kerasdist.core.structures import Arguments
from kerasdist.errors import StateLostError, UnsupportedError
from kerasdist.training.metrics import prepare
from kerasdist.training.passes import refused
from kerasdist.training.trainer import Original, ReplicatedTrainer

if TYPE_CHECKING:
    from kerasdist.api.strategy import Strategy
    from kerasdist.backends.base.interface import ReplicaSet
    from kerasdist.backends.jax.mesh.placement import Placement

    class _Replicas(ReplicaSet):
        arrays: Placement


# The lists of a model's variables whose values each kind of step takes.
_STATES = {
    "train_step": TRAIN_STATE,
    "test_step": ("trainable_variables", "non_trainable_variables", "metrics_variables"),
    "predict_step": ("trainable_variables", "non_trainable_variables"),
}


@cache
def install() -> None:
    """Makes models store the state of steps without Keras's tracking of attributes.

    The tracking would search all state for layers and variables in each step.
    """
    keras_compat.install(set_attribute=keras_compat.Method(_untracked))


def _untracked(original: Original) -> Original:
    name_of_state = keras_compat.internals.JAX_STATE.attribute

    def set_attribute(model: object, name: str, value: object) -> None:
        if name == name_of_state and TRAINER in vars(model):
            object.__setattr__(model, name, value)
        else:
            original(model, name, value)

    return set_attribute


@final
class JaxTrainer(ReplicatedTrainer):
    """Runs a model's steps as one program on the devices of its strategy."""

    HOOKED = (*ReplicatedTrainer.HOOKED, "__call__", "stateless_call", "take_state")

    if TYPE_CHECKING:
        replicas: _Replicas

    # The thread in which `fit`, `evaluate` or `predict` last took values out of the variables.
    _steps_thread = 0
    # Whether a step has failed after it had consumed the values of the model's variables.
    _is_lost = False

    def __init__(self, model: Any, strategy: Strategy, replicas: Any) -> None:
        """Makes the trainer; with ``sharding="auto"``, uses the layout map of the model's class."""
        install()
        super().__init__(model, strategy, replicas)
        if isinstance(replicas.logical_devices.rule, OverReplicas):
            replicas.logical_devices.rule.add_map_of(type(model))

    @property
    def trial_class(self) -> type[Any]:
        """The class of trials, which compare a step on the mesh with the step on one device."""
        if self.replicas.num_replicas == 1:
            return super().trial_class
        from kerasdist.backends.jax.fit.trial import JaxTrial  # few programs need it

        return JaxTrial

    def __call__(self, original: Original, *args: object, **kwargs: object) -> Any:
        """Calls the model.

        Keras may call the model with a global array, to build layers. The model then gets only the
        part of the array that this worker's first device holds.
        """
        args, kwargs = jax.tree.map(_rows_here, take((args, kwargs)))
        is_before_steps = not current.replicas and keras_compat.get_stateless_scope() is not None
        with self.building() if is_before_steps and not self.model.built else nullcontext():
            return original(*args, **kwargs)

    def stateless_call(
        self,
        original: Original,
        weights: Any,
        state: Any,
        *args: object,
        return_losses: bool = False,
        **kwargs: object,
    ) -> Any:
        """Calls the model; in several passes if a training batch has too many rows for one."""
        call = partial(original, weights, state)
        rows = passes.rows_of_passes(self, args, kwargs)
        if rows is None:
            return call(*args, return_losses=return_losses, **kwargs)
        outputs, losses = passes.calls(self, call, state, Arguments(args, kwargs), rows)
        return (outputs, state, losses) if return_losses else (outputs, state)

    def require_passes(self) -> None:
        """Refuses a model if it is known that its calls cannot be split into passes."""
        if self.model.run_eagerly:
            raise refused("run_eagerly=True, by which an operation runs for all rows at once")
        super().require_passes()

    def make_function(self, name: str, original: Original, force: bool = False) -> Any:
        """Makes the function that `fit`, `evaluate` or `predict` calls.

        First puts back values that earlier steps took out of the variables.
        """
        self._begin()
        return super().make_function(name, original, force)

    def build_symbolically(self, original: Original, *args: object, **kwargs: object) -> None:
        """Builds unbuilt layers. First puts back values that steps took out of the variables."""
        self._begin()
        super().build_symbolically(original, *args, **kwargs)

    def _begin(self) -> None:
        """Puts back values that earlier steps in this thread took out of the variables.

        Values are still out if, for example, a callback of `fit` calls `evaluate` between two
        steps. Raises an error if steps of another thread have the values.
        """
        is_synced = keras_compat.is_state_synced(self.model)
        if not is_synced and self._steps_thread != threading.get_ident():
            raise self._in_use()
        self.model.jax_state_sync()

    def _in_use(self) -> UnsupportedError:
        return UnsupportedError(
            "Expected one call of fit, evaluate or predict of a model at a time: on JAX its steps "
            f"take the values out of the variables. Received: model={self.model.name!r}, whose "
            "steps run in two threads. Give one thread a model of its own with the same weights: "
            "other.set_weights(model.get_weights())."
        )

    def new_function(self, step: str, original: Original) -> Callable[..., Any]:
        """Returns a function that runs one or more steps on the model's state and on batches."""
        model, names, trains = self.model, _STATES[step], step == "train_step"
        if self.replicas.num_replicas > 1:
            prepare(model, self.strategy)
        predicts = step == "predict_step"
        own = self._predict_step if predicts else getattr(model, step)
        make = partial(StepFunction, model, own, self.replicas.arrays, keeps_outputs=predicts)
        run = make()
        finds_rows = trains and config.most_examples_at_once() == "auto"
        finds_rows = finds_rows and model.jit_compile and not model.run_eagerly

        def function(state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
            nonlocal run
            meter = current.meter if trains else None
            batches: Any = iterator if self.replicas.job is None else map(take, iterator)
            rows: list[int] = []  # how many rows each taken batch has

            def counted(batch: object) -> object:
                rows.append(metering.rows_of(batch))
                return batch

            batches = batches if meter is None else map(counted, batches)
            try:
                self.replicas.begin_step()
                if finds_rows:
                    run, batches = self._with_rows_found(make, run, state, batches)
                outputs, new = run(state, batches)
            except BaseException:
                # Keras has taken the values out of the variables for the time of the step. After an
                # error the values are put back, because Keras would initialize empty variables
                # again. But if the step failed on the devices, for example because a worker was
                # lost, the step has consumed the values, and they cannot be put back.
                self._is_lost = any(value.is_deleted() for value in jax.tree.leaves(state))
                if not self._is_lost:
                    keras_compat.put_state(model, dict(zip(names, state, strict=True)))
                    model.jax_state_sync()
                raise
            if meter is not None:
                meter.done(len(rows), sum(rows), outputs)
            return outputs, new

        return function

    def _predict_step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        outputs, non_trainable_variables = self.model.predict_step(state, batch)
        return outputs, (state[0], non_trainable_variables)

    def _with_rows_found(
        self, make: Callable[[], StepFunction], run: StepFunction, state: Any, batches: Any
    ) -> tuple[StepFunction, Iterator[Any]]:
        """Finds how many rows a pass may have, so that a step fits into a device's memory.

        Returns the step function for this number of rows, and the batches of the next execution,
        which this method takes from `batches`. For this, steps are compiled but not run, because
        XLA reports how much memory a compiled program needs. All workers must call this method.
        """
        replicas, steps = self.replicas, itertools.islice(batches, self.model.steps_per_execution)
        taken = list(map(replicas.arrays.copy_batch, steps))

        def attempt(batch: Any) -> None:
            nonlocal run
            if self.most_rows is not None:  # a new number of rows per pass needs a new trace
                run = make()
            needed = run.compiled.bytes_needed(state, [replicas.arrays.batch(batch)])
            free = replicas.free_bytes()
            if free is not None and needed > free:
                raise jax.errors.JaxRuntimeError(
                    f"RESOURCE_EXHAUSTED: A step needs {needed} bytes of a device beside its "
                    f"arguments, and {free} are free."
                )

        for batch in taken:
            examples = metering.rows_of(batch)
            rows = -(-examples // replicas.num_replicas)
            memory.find(self, examples, rows, partial(attempt, batch))
        return run, iter(taken)

    def take_state(
        self, original: Original, *, purge_model_variables: bool = False, **which: bool
    ) -> tuple[Any, ...]:
        """Returns the values of the model's variables, which Keras's loop passes to its steps.

        When steps begin (`purge_model_variables`), the variables give up their values, so that only
        one copy of the values exists.
        """
        model, replicas = self.model, self.replicas
        if replicas.job is not None:
            replicas.initial_broadcast.ensure()
        variables: dict[str, list[Any]] = {}
        for name in TRAIN_STATE:  # in Keras's order
            if name == "optimizer_variables" and which.get(name):
                if replicas.arrays.layout.shards_state:
                    note_all(model.optimizer, model.trainable_variables)
                variables[name] = list(model.optimizer.variables)
            elif which.get(name):
                variables[name] = list(getattr(model, name))
        # Keras's own method is not called. It reads variables as user code does, which would gather
        # sharded values.
        values = tuple(map(keras_compat.stored_values, variables.values()))
        if any(one is None for several in values for one in several):
            raise self._in_use()
        state = replicas.arrays.state(values, tuple(variables.values()))
        if replicas.arrays.layout.rule is not None:
            trained = variables.values() if purge_model_variables else ()
            replicas.arrays.layout.rule.require_useful(itertools.chain.from_iterable(trained))
        if purge_model_variables:
            self._is_lost = False
            keras_compat.put_state(model, dict(zip(variables, state, strict=True)))
            self._steps_thread = threading.get_ident()
            for name, several in variables.items():
                donation.mark_in_steps(several, self._copy_in_steps, name)
                keras_compat.store_values(several, [None] * len(several))
        return state

    def _copy_in_steps(self, variable: keras.Variable, name: str, index: int) -> Any:
        """Returns a copy of a value that steps have taken out of a variable.

        Any thread may call this method. Returns None if there is no value now, for example because
        a step has just consumed it.
        """
        with donation.launching:
            stored, state = keras_compat.stored_value(variable), keras_compat.state_of(self.model)
            if stored is not None and not stored.is_deleted():
                return copied(local_copy(stored))
            if state is not None and not state[name][index].is_deleted():
                return copied(local_copy(state[name][index]))
        if self._is_lost:
            raise StateLostError(
                "Expected a value of a variable. Received: "
                f"variable={variable.path!r} of model={self.model.name!r}, whose last step failed "
                "on the devices, after it had begun to overwrite the state. Load a "
                "checkpoint (model.load_weights), or start again with "
                "kerasdist.callbacks.BackupAndRestore, which goes on from the last backup."
            )
        return None


def _rows_here(leaf: Any) -> Any:
    is_global = (
        isinstance(leaf, jax.Array) and not is_traced(leaf) and not leaf.is_fully_addressable
    )
    return leaf.addressable_data(0) if is_global else leaf
