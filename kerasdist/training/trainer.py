"""The base class of the backends' trainers, which run the steps of a model made in a scope.

Keras's loops call methods of the model. If the model's class does not override such a method, the
hooks of `training.hooks` call the model's trainer instead. A trainer decides how a step gets its
data and how the step is compiled, but never what the step computes. A `train_step` that the user
defines still takes precedence, and so does everything else that a user's class defines or that is
set on the model.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import keras

from kerasdist import keras_compat
from kerasdist.backends.base.model_trainer import TrainerLike
from kerasdist.core.context import current, whole_step
from kerasdist.errors import UnsupportedError
from kerasdist.training import passes, worker_agreement
from kerasdist.training.metrics import summed

Original = Callable[..., Any]

# The methods of a model that determine what a step reports.
_REPORTING = ("train_step", "test_step", "compute_metrics", "get_metrics_result")


# For each method of a model that makes a function: the step that this function runs. If a user
# overrides such a method and does not call super(), the step would run on one device only, so
# `require_made` raises an error.
STEPS = {
    "make_train_function": "train_step",
    "make_test_function": "test_step",
    "make_predict_function": "predict_step",
}


class ReplicatedTrainer(TrainerLike):
    """Runs the steps of one Keras model on the replicas of its strategy.

    This class is abstract, and every backend has a subclass. A method listed in `HOOKED` replaces
    the model's method of that name. The trainer's method gets Keras's own method as its first
    argument, and then the arguments of the call. `make_function` replaces the methods in `STEPS`.

    Attributes:
        runs_builtin_steps: Whether Keras's own code alone determines what a step reports. The value
            is False until `note_overrides` has determined it.
    """

    # The hooks for these methods have the same names in `PATCHES`, the table of patches.
    HOOKED: tuple[str, ...] = (
        "predict_on_batch",
        "get_metrics_result",
        "compute_loss",
        "build_symbolically",
    )

    runs_builtin_steps = False

    @staticmethod
    def prepare_other(model: keras.Model, replicas: Any) -> None:
        """Prepares training of a model that has no strategy, but has layers of a strategy's model.

        By default this method does nothing. A subclass overrides it if its framework needs this.
        """

    def make_function(self, name: str, original: Original, force: bool = False) -> Any:
        """Returns the function that the loop of `fit`, `evaluate` or `predict` calls.

        `name` is a key of `STEPS`. If the model already has the function, it is made again only
        with `force`.
        """
        self.made.add(name)
        attribute = name.removeprefix("make_")
        if force or getattr(self.model, attribute) is None:
            setattr(self.model, attribute, self.new_function(STEPS[name], original))
        return getattr(self.model, attribute)

    @abc.abstractmethod
    def new_function(self, step: str, original: Original) -> Callable[..., Any]:
        """Returns a function that Keras's loop calls, and that runs the step of this name.

        `original` is Keras's own method that makes such a function.
        """

    def predict_on_batch(self, original: Original, *args: object, **kwargs: object) -> Any:
        """Predicts one batch by Keras's own method, on the strategy's devices."""
        with worker_agreement.working("predict_on_batch", self.replicas, self.model):
            return original(*args, **kwargs)

    def ensure_built(self, x: Any) -> None:
        """Makes the variables of a model that was never called, before replicas run it."""
        if self.model.built and keras_compat.has_built_layers(self.model):
            return
        symbolic = keras.tree.map_structure(symbol_of, x)
        with self.building():
            self.model(symbolic)

    def build_symbolically(self, original: Original, *args: object, **kwargs: object) -> None:
        """Builds unbuilt layers from the shapes of a batch, inside the strategy's scope."""
        with self.building():
            original(*args, **kwargs)

    @contextmanager
    def building(self) -> Generator[None]:
        """Opens the scope, so that layers built in the block get variables of the strategy."""
        # A replica's step may build another model. Inside of a replica, new variables belong to the
        # strategy anyway, so the scope is not opened.
        with (
            self.strategy.scope() if current.replica is None else nullcontext(),
            nullcontext() if current.replicas else whole_step(self.strategy),
        ):
            yield

    def compute_loss(
        self,
        original: Original,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        *args: object,
        **kwargs: object,
    ) -> Any:
        """Computes the loss that was given to `compile`.

        If the model has several outputs and `y` is a single target, `y` is put into a list. Without
        the list, Keras 3.15 would take an eager tensor for a list of targets if the tensor has as
        many rows as the model has outputs. A replica may have that number of rows even if the
        global batch has another number.
        """
        nested = keras.tree.is_nested
        if current.fit_replica is not None and nested(y_pred) and not nested(y) and y is not None:
            y = [y]
        return original(x, y, y_pred, *args, **kwargs)

    def get_metrics_result(self, original: Original) -> dict[str, Any]:
        """Returns the results of the metrics, which the steps have already summed over processes.

        In a replica that runs Keras's own step, returns {}. Such a step does nothing with the
        results but return them, so the trainer reads the metrics after the step instead.
        """
        replica = current.fit_replica
        if replica is None:
            # This does the same as `whole_step`, without the cost of a context manager.
            current.replicas.append(self.strategy.sole_replica_context)
            try:
                return keras_compat.metrics_here(self.model)
            finally:
                current.replicas.pop()
        if self.runs_builtin_steps:
            return {}
        with summed(replica, self.model.metrics):
            return keras_compat.metrics_here(self.model)

    def require_passes(self) -> None:
        """Refuses a model that cannot be called in passes, if this is known before a step runs."""
        passes.require_rows_alone(self.model)

    def note_overrides(self) -> bool:
        """Sets `runs_builtin_steps` by the methods that the model has now, and returns it."""
        self.runs_builtin_steps = all(map(self.has_builtin, _REPORTING))
        return self.runs_builtin_steps


def symbol_of(leaf: Any) -> Any:
    """Returns a symbolic tensor with the type and shape of an array; returns None if given None."""
    if leaf is None:  # this optional input was not given
        return None
    return keras.KerasTensor(tuple(leaf.shape), keras.backend.standardize_dtype(leaf.dtype))


def watch_functions(trainer: TrainerLike, given: dict[str, Any]) -> None:
    """Adds a callback that calls `require_made` when training, evaluation or prediction begins."""
    is_alone = trainer.replicas.num_replicas == 1
    if is_alone or all(map(trainer.has_builtin, STEPS)):
        return
    watching = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: require_made(trainer, "make_train_function"),
        on_test_begin=lambda logs: require_made(trainer, "make_test_function"),
        on_predict_begin=lambda logs: require_made(trainer, "make_predict_function"),
    )
    callbacks = given["callbacks"]
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.callbacks.append(watching)
    else:
        given["callbacks"] = [*keras_compat.callbacks_of(callbacks), watching]


def require_made(trainer: TrainerLike, name: str) -> None:
    """Raises an error if there are several replicas and the trainer has not made the function."""
    if trainer.replicas.num_replicas == 1 or name in trainer.made:
        return
    model = trainer.model
    raise UnsupportedError(
        f"Expected a {name} that calls super().{name}(), which makes a function for all replicas. "
        f"Received: model={model.name!r}, whose own {name} does not. Override {STEPS[name]}, or "
        f"call super().{name}() and wrap the function that it sets."
    )
