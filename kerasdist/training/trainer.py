"""The base class of the backends' trainers, which kerasdist puts before a model's own class.

A trainer overrides what feeds and compiles a step, never the step: a user-defined `train_step`
still wins, and so does everything else that a user's class defines.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import keras

from kerasdist import keras_compat
from kerasdist.backends.base.interface import ReplicaSet
from kerasdist.core.context import current
from kerasdist.training import saving, worker_agreement
from kerasdist.training.metrics import summed

if TYPE_CHECKING:
    from kerasdist.api.strategy import Strategy

    _Model = keras.Model  # the class that a trainer is put before
else:
    _Model = object

# The methods of a model that make what a step reports.
_REPORTING = ("train_step", "test_step", "compute_metrics", "get_metrics_result")


class ReplicatedTrainer(_Model):
    """Runs the steps of a Keras model on the replicas of its strategy.

    An abstract class: every backend has a subclass. It does not inherit from ``abc.ABC``, since the
    class of a model can only be replaced by one of the same memory layout, and ``abc.ABC``, having
    no ``__dict__``, has another layout.

    Attributes:
        bound_strategy: The strategy that this model was made under; `remember` sets it.
        replica_set: Its replica set.
        runs_builtin_steps: Whether no user-defined class changes what a step reports; known once
            a step has been made.
    """

    bound_strategy: Strategy
    replica_set: ReplicaSet
    runs_builtin_steps = False

    @staticmethod
    def prepare_other(model: keras.Model, replicas: Any) -> None:
        """Prepares a model without a strategy to train, if it shares layers with one of this class.

        On most frameworks there is nothing to prepare.
        """

    def predict_on_batch(self, *args: object, **kwargs: object) -> Any:
        """Predicts one batch, as Keras's own method, on the strategy's devices."""
        replicas = self.replica_set
        with replicas.placement(), worker_agreement.working("predict_on_batch", replicas, self):
            return super().predict_on_batch(*args, **kwargs)

    def export(self, filepath: Any, *args: object, **kwargs: object) -> None:
        """Exports the model, as Keras's own method; in a job, the chief writes."""
        saving.save(super(ReplicatedTrainer, type(self)).export, self, filepath, *args, **kwargs)

    def ensure_built(self, x: Any) -> None:
        """Makes the variables of a model that was never called, before replicas run it."""
        layers = self._flatten_layers()
        if all(layer.built for layer in layers):
            return
        symbolic = keras.tree.map_structure(_symbol, x)
        with self._building():
            self(symbolic)

    def prepare_step(self, batch: Any) -> None:
        """Makes the variables, the metrics and the optimizer's state of a training step."""
        self._symbolic_build(data_batch=batch)
        self.make_train_function()

    def _symbolic_build(self, *args: object, **kwargs: object) -> None:
        with self._building():
            super()._symbolic_build(*args, **kwargs)

    def _building(self) -> AbstractContextManager[Any]:
        """Opens the scope, so that the variables that building makes belong to the strategy."""
        # In a replica, where a step may train another model, the strategy is in force already.
        return nullcontext() if current.replica is not None else self.bound_strategy.scope()

    def get_metrics_result(self) -> dict[str, Any]:
        """Returns the metrics' results; {} in a replica that runs Keras's own step."""
        replica = current.fit_replica
        if replica is None:
            return super().get_metrics_result()
        if self.runs_builtin_steps:
            return {}
        with summed(replica, self.metrics):
            return super().get_metrics_result()

    def has_builtin(self, step: str) -> bool:
        """Returns whether a step is Keras's own."""
        return keras_compat.is_builtin(defined_by_model(type(self), step))

    def note_overrides(self) -> bool:
        """Sets `runs_builtin_steps`, as a step is made, and returns it."""
        type(self).runs_builtin_steps = all(map(self.has_builtin, _REPORTING))
        return self.runs_builtin_steps


def _symbol(leaf: Any) -> Any:
    if leaf is None:  # an optional input that is not given
        return None
    return keras.KerasTensor(leaf.shape, keras.backend.standardize_dtype(leaf.dtype))


def defined_by_model(model_class: type, name: str) -> Any:
    """Returns what a class has by this name from others than kerasdist's, None if nothing."""
    for parent in model_class.__mro__:
        if name in vars(parent) and not parent.__module__.startswith("kerasdist."):
            return vars(parent)[name]
    return None
