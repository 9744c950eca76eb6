"""The interface of runners, which call user functions once per replica, for custom loops."""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final

import keras
import numpy as np

from kerasdist.api.options import CommunicationOptions, ReduceOp
from kerasdist.api.values import DistributedValues, sole_component
from kerasdist.backends.base.checks import axis_of_rows, checked_axes
from kerasdist.core import ownership
from kerasdist.core.context import StrategyLike, replica_scope
from kerasdist.core.structures import Arguments, map_leaves
from kerasdist.input.sharding import split_batch
from kerasdist.keras_compat import ops

if TYPE_CHECKING:
    from kerasdist.input.distributed import DistributedDataset


class Runner(abc.ABC):
    """Runs user functions once per replica; distributes their arguments and combines their results.

    Most methods implement a method of ``tf.distribute.Strategy`` or of its ``extended``, with the
    same meaning. All methods are called in cross-replica context: in a scope, or in the function
    that `ReplicaContext.merge_call` runs.

    Attributes:
        places_ahead: Whether to place the next batch on the devices while the current one is used.
            On CPUs this saves no time, because the next batch would drop out of the processor's
            caches before its use.
    """

    places_ahead = True

    @abc.abstractmethod
    def run(self, strategy: StrategyLike, function: Callable[..., Any], given: Arguments) -> Any:
        """Calls a function once per replica, with that replica's components of the arguments.

        Args:
            strategy: The strategy, whose scope is open.
            function: The function. During its call, `current.replica` is the replica's context.
            given: The function's arguments.

        Returns:
            The function's results as one structure. A leaf is a `PerReplica`, or the object itself
            if all replicas return the same object.
        """

    @abc.abstractmethod
    def reduce(self, op: ReduceOp, value: Any, axis: int | Sequence[int] | None) -> Any:
        """Returns the sum or mean over a value's components, and over axes of these components.

        Args:
            op: The operation.
            value: A distributed value; a tensor counts as a distributed value with equal
                components.
            axis: The axis or axes of each component over which to sum or average as well. None:
                the result has the shape of a component.
        """

    @abc.abstractmethod
    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates the components of a value along an axis.

        Args:
            value: A distributed value; its components may differ in size along `axis`.
            axis: The axis.
        """

    def reduce_to(
        self, op: ReduceOp, values: Sequence[Any], options: CommunicationOptions
    ) -> list[Any]:
        """Returns the sum or mean of each value, as a `Mirrored` or a tensor.

        Args:
            op: The operation.
            values: Distributed values.
            options: How to communicate.
        """
        return [self.broadcast(self.reduce(op, value, None)) for value in values]

    @abc.abstractmethod
    def broadcast(self, tensor: Any) -> Any:
        """Returns a distributed value whose component on every replica is the given tensor.

        Args:
            tensor: The tensor.
        """

    @abc.abstractmethod
    def update(
        self, variable: keras.Variable, function: Callable[..., Any], given: Arguments
    ) -> Sequence[Any]:
        """Calls a function with a variable and other arguments, once for each copy of the variable.

        Args:
            variable: A variable of the strategy.
            function: A function that changes a copy.
            given: The other arguments; a distributed value is replaced by the component that
                belongs to the copy.

        Returns:
            The function's result for each copy.
        """

    @abc.abstractmethod
    def per_replica(self, values: Sequence[Any]) -> Any:
        """Returns a distributed value of the given components, each on its replica's device.

        Args:
            values: One structure of arrays, or of other objects, per replica.
        """

    def divide(self, strategy: StrategyLike, batch: Any) -> Any:
        """Cuts a global batch into one local batch per replica; returns a distributed value.

        Args:
            strategy: The strategy.
            batch: Arrays with the examples along axis 0, in any structure.

        Raises:
            InputError: If the arrays differ in their number of examples.
        """
        here = strategy.local_replicas
        return self.per_replica(
            split_batch(batch, strategy.num_replicas_in_sync)[here.start : here.stop]
        )

    def native_dataset(self, dataset: DistributedDataset) -> Any | None:
        """Returns the framework's equivalent of a distributed dataset, or None if it has none.

        Args:
            dataset: A dataset over this runner's replicas.
        """
        return None

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the components of a distributed value or of a variable, in this process.

        Args:
            value: A distributed value or a variable. Anything else is returned in a tuple of one.
        """
        if isinstance(value, DistributedValues):
            return value.values
        return self.copies_of(value) if isinstance(value, keras.Variable) else (value,)

    def copies_of(self, variable: keras.Variable) -> tuple[Any, ...]:
        """Returns the value of a variable on each replica of this process.

        Args:
            variable: A variable of Keras.
        """
        return (variable,)

    def read(self, variable: keras.Variable) -> Any:
        """Returns the value of a variable as cross-replica code sees it.

        Args:
            variable: A variable of Keras or of the framework.
        """
        return ops.convert_to_tensor(variable)

    def created(self, variable: keras.Variable) -> bool:
        """Returns whether a variable was made in the scope of a strategy over these replicas.

        Args:
            variable: A variable of Keras or of the framework.
        """
        strategy = ownership.strategy_of(variable)
        replicas = None if strategy is None else strategy.replica_set
        return replicas is not None and replicas.runner is self


_ARRAYS = (np.ndarray, np.generic)


@final
class SoleRunner(Runner):
    """The runner of a single replica, which passes and returns plain values, not `PerReplica`s."""

    def __init__(
        self, placement: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    ) -> None:
        self._placement = placement

    def run(self, strategy: StrategyLike, function: Callable[..., Any], given: Arguments) -> Any:
        """Calls the function, in the context of the only replica."""
        with self._placement(), replica_scope(strategy.sole_replica_context):
            return sole_component(given).call(function)

    def reduce(self, op: ReduceOp, value: Any, axis: int | Sequence[int] | None) -> Any:
        """Returns the value, reduced along the given axes."""
        value = sole_component(value)
        if axis is None:
            return value
        value = ops.convert_to_tensor(value)
        axes = checked_axes(value, axis)
        if op is ReduceOp.SUM:
            return ops.sum(value, axis=axes)
        if "float64" in str(value.dtype):
            # `ops.mean` would compute in float32 on JAX and PyTorch (Keras 3.15.1).
            return ops.sum(value, axis=axes) / math.prod(ops.shape(value)[one] for one in axes)
        return ops.mean(value, axis=axes)

    def gather(self, value: Any, axis: int) -> Any:
        """Returns the value itself."""
        value = sole_component(value)
        axis_of_rows(value, axis)
        return value

    def broadcast(self, tensor: Any) -> Any:
        """Returns the tensor itself."""
        return tensor

    def update(
        self, variable: keras.Variable, function: Callable[..., Any], given: Arguments
    ) -> Sequence[Any]:
        """Calls the function once, with the variable itself."""
        return [sole_component(given).call(function, variable)]

    def per_replica(self, values: Sequence[Any]) -> Any:
        """Returns the only value, with its arrays as tensors on the replica's device."""

        def placed(leaf: object) -> Any:
            return ops.convert_to_tensor(leaf) if isinstance(leaf, _ARRAYS) else leaf

        with self._placement():
            return map_leaves(placed, values[0])

    def created(self, variable: keras.Variable) -> bool:
        """Returns True, because with one replica any variable can be used."""
        return True
