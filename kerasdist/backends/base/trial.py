"""A trial: one training step on copies of the variables, so that the model does not change."""

from __future__ import annotations

import abc
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from kerasdist import keras_compat
from kerasdist.backends.base.collectives import Apply, Variables
from kerasdist.backends.base.metering import rows_of
from kerasdist.backends.base.model_trainer import TrainerLike
from kerasdist.core.context import current, replaced
from kerasdist.input import sharding
from kerasdist.keras_compat import ops

_HALF = ("bfloat16", "float16")


class Draws:
    """Supplies the random numbers of a trial.

    This class draws new numbers in each trial, for trials that are not compared with each other.
    Trials that are compared need equal numbers, which the subclass `RecordedDraws` supplies.
    """

    def draw(self, name: str, draw: Callable[[], Any], given: Any) -> Any:
        """Returns the result of a random function, or another result in its place.

        Args:
            name: The function's name.
            draw: A function without arguments that calls the random function.
            given: The random function's first argument. In trials that are compared, this argument
                is returned instead of the result if the function would only drop, scale or reorder
                its elements, as dropout does.
        """
        return draw()


@dataclass(frozen=True, eq=False)
class TriedBatch:
    """The batch of a trial's step, as the replicas take it and as one device takes it.

    Attributes:
        given: The batch as the trainer takes it: a global batch, or this worker's rows.
        whole: The global batch, for the step on one device.
        sizes: How many examples each replica gets, for the replicas of all workers.
    """

    given: Any
    whole: Any
    sizes: Sequence[int]

    @property
    def examples(self) -> int:
        """How many examples the global batch has."""
        return sum(self.sizes)


class Trial(keras.StatelessScope, abc.ABC):
    """One training step of a model, either on the replicas or on one device, as in plain Keras.

    A trial is a Keras StatelessScope, so all threads of the step read and write Keras variables
    through it. A variable is copied at its first use, and the copies are dropped with the trial.

    Attributes:
        draws: The object that supplies the step's random numbers.
        seed: The seed for random draws that Keras does not seed; equal on all workers.
        gradients: The gradients, by the number of the optimizer's step and the variable's path.
        outputs: The outputs of the model's first call, by the replica's number. For a step on one
            device, the only key is None.
        layer_losses: For each layer's id, the layer and the losses that it added by ``add_loss`` in
            the step on one device.
        makes_passes: Whether the step may call the model several times, each time with some of the
            rows, to save memory. Steps outside of trials may always do this.
    """

    makes_passes = False

    def __init__(
        self, trainer: TrainerLike, draws: Draws, *, alone: bool, outputs: bool, seed: int
    ) -> None:
        super().__init__(initialize_variables=False)
        self.draws = draws
        self.seed = seed
        self.gradients: dict[str, Any] = {}
        self.outputs: dict[int | None, list[Any]] = {}
        self.layer_losses: dict[int, tuple[Any, list[Any]]] = {}
        self._trainer: Any = trainer
        self._model: Any = trainer.model
        self._replicas: Any = trainer.replicas
        self._alone = alone
        self._wants_outputs = outputs
        # For each variable's id: the variable and its copy. While the variable is stored here, no
        # other object can get the same id.
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._applied = 0
        self._applying: list[Any] = []

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Returns a variable's copy, made at the first use; None if the variable has no value."""
        known = self._copies.get(id(variable))
        if known is None:
            with keras_compat.in_trial(None):
                keras_compat.initialize_waiting_variable(variable)
                known = self._copies[id(variable)] = variable, self.copy(variable)
        return known[1]

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Assigns to the copy of a variable."""
        self.write(*update)

    def free_copies(self) -> None:
        """Drops the copies of the variables, after the step."""
        self._copies.clear()

    @contextmanager
    def own_state_kept(self) -> Generator[None]:
        """When the block ends, restores state outside of Keras variables, such as torch's buffers.

        This default restores nothing. A backend whose models have such state overrides it.
        """
        yield

    @abc.abstractmethod
    def copy(self, variable: keras.Variable) -> Any:
        """Returns what the step reads in place of a variable: usually a copy of its value."""

    @abc.abstractmethod
    def write(self, variable: keras.Variable, value: Any) -> None:
        """Assigns to the copy of a variable."""

    @abc.abstractmethod
    def take(self, batch: TriedBatch) -> Any:
        """Runs the step, on one device or on the replicas, and returns the step's logs."""

    @staticmethod
    def as_array(value: Any) -> Any:
        """Returns a tensor or a gradient as a NumPy array; a sparse tensor becomes dense."""
        array = ops.convert_to_numpy(value)
        return array.astype("float32") if array.dtype.name in _HALF else array

    def value_of(self, variable: keras.Variable) -> Any:
        """Returns the full value that a variable has in the step, as a NumPy array."""
        return self.as_array(variable.value)

    def values(self, variables: Sequence[keras.Variable]) -> dict[str, Any]:
        """Returns the values that variables have in the step, by path."""
        return {one.path: self.value_of(one) for one in variables}

    def change(self, part: float) -> None:
        """Multiplies the copies of weights by random factors from ``1 - part`` to ``1 + part``."""
        numbers = np.random.default_rng(self.seed)
        for variable in self._model.trainable_variables:
            if keras.backend.is_float_dtype(variable.dtype):
                factors = 1.0 + numbers.uniform(-part, part, tuple(variable.shape))
                variable.assign(ops.cast(self.value_of(variable) * factors, variable.dtype))

    def stand_in(self, optimizer: keras.Optimizer) -> Any:
        """Returns the optimizer, or an object that updates the variables' copies in its place."""
        return optimizer

    def apply_gradients(
        self,
        original: Apply,
        optimizer: keras.Optimizer,
        gradients: list[Any],
        variables: Variables,
    ) -> Any:
        """Lets an optimizer update the copies of the variables, and records the gradients."""
        if optimizer in self._applying:  # An outer call of this method handles this update.
            return original(optimizer, gradients, variables)
        self._build(optimizer, variables)
        if not isinstance(optimizer, keras_compat.LossScaleOptimizer):
            # A LossScaleOptimizer calls its inner optimizer if all gradients are finite, and that
            # call records them.
            self._record(optimizer, gradients, variables)
        own = self.stand_in(optimizer)
        with replaced(self, "_applying", [*self._applying, optimizer, own]):
            return original(own, gradients, variables)

    def _build(self, optimizer: keras.Optimizer, variables: Any) -> None:
        """Makes the optimizer's variables, as the first step under the strategy would make them."""
        if optimizer.built or variables is None:
            return
        with (
            keras_compat.in_trial(None),
            self._replicas.placement(),
            keras.name_scope(optimizer.name),
        ):
            optimizer.build(variables)

    def _record(self, optimizer: keras.Optimizer, gradients: list[Any], variables: Any) -> None:
        known = keras_compat.optimized_variables(optimizer) if variables is None else variables
        self._applied += 1
        prefix = f"step {self._applied} of the optimizers, " if self._applied > 1 else ""
        for gradient, variable in zip(gradients, known, strict=False):
            if gradient is not None:
                name = prefix + getattr(variable, "path", getattr(variable, "name", "variable"))
                self.gradients[name] = self.as_array(gradient)

    def record_outputs(self, model: keras.Model, outputs: Any) -> None:
        """Records the outputs of the model's first call, on one device or on a replica."""
        replica = current.replica
        key = None if replica is None else replica.replica_id_in_sync_group
        if self._wants_outputs and model is self._model and key not in self.outputs:
            tensors = [one for one in keras.tree.flatten(outputs) if keras.ops.is_tensor(one)]
            self.outputs[key] = [self.as_array(one) for one in tensors]

    @classmethod
    def gathered(cls, replicas: Any, batch: Any, *, spares: bool) -> TriedBatch:
        """Returns a batch with the examples of all replicas, in the order of the replicas.

        If `spares`, only the first examples are taken, so that a step on one device needs little
        time and memory. All workers must call this method.
        """
        sizes = sharding.piece_sizes(rows_of(batch), replicas.num_replicas)
        chosen = sharding.trial_sizes(sizes) if spares else sizes
        if chosen != sizes:
            batch = cls.first_rows(batch, sum(chosen))
        return TriedBatch(batch, batch, chosen)

    @staticmethod
    def first_rows(batch: Any, count: int) -> Any:
        """Returns the first examples of a batch."""
        return sharding.rows(batch, 0, count)


class MemoryTrial(Trial, abc.ABC):
    """A trial that shows whether a training step fits into memory; it updates no variable."""

    makes_passes = True

    def __init__(self, trainer: TrainerLike) -> None:
        super().__init__(trainer, Draws(), alone=True, outputs=False, seed=0)

    def write(self, variable: keras.Variable, value: Any) -> None:
        """Lets the step read the assigned value; the variable itself does not change."""
        self._copies[id(variable)] = variable, value

    def apply_gradients(
        self,
        original: Apply,
        optimizer: keras.Optimizer,
        gradients: list[Any],
        variables: Variables,
    ) -> Any:
        """Updates nothing, but makes the optimizer's variables, because they take memory too."""
        self._build(optimizer, variables)
