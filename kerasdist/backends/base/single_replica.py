"""The runner and the collectives of a single replica, on every backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final

import numpy as np

from kerasdist.api.options import CommunicationOptions, ReduceOp
from kerasdist.api.values import DistributedValues, component
from kerasdist.backends.base.checks import checked_axis
from kerasdist.backends.base.collectives import DEFAULT_COMMUNICATION, Apply, Collectives, Variables
from kerasdist.backends.base.runner import Runner
from kerasdist.core import context
from kerasdist.core.structures import Arguments, flatten, map_leaves

if TYPE_CHECKING:
    import keras

    from kerasdist.core.protocols import StrategyLike


@final
class SoleReplica(Collectives):
    """The collectives of a strategy's only replica."""

    def merge_call(
        self, strategy: StrategyLike, function: Callable[..., Any], given: Arguments
    ) -> Any:
        """Calls the function, in cross-replica context."""
        with context.replica_scope(None):
            return _sole_components(given.call(function, strategy))

    def all_sum(
        self, tensors: Sequence[Any], options: CommunicationOptions = DEFAULT_COMMUNICATION
    ) -> list[Any]:
        """Returns the tensors themselves."""
        return list(tensors)

    def mean_of_sum(self, total: Any, replicas: int) -> Any:
        """Returns the tensor itself."""
        return total

    def all_gather(self, tensor: Any, axis: int = 0) -> Any:
        """Returns the tensor itself."""
        return tensor

    def apply_gradients(
        self, apply: Apply, optimizer: keras.Optimizer, gradients: list[Any], variables: Variables
    ) -> Any:
        """Calls Keras's own ``apply``."""
        return apply(optimizer, gradients, variables)


@final
class SoleRunner(Runner):
    """Calls functions directly; distributed values are plain values."""

    def __init__(
        self, placement: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    ) -> None:
        self._placement = placement

    def run(self, strategy: StrategyLike, function: Callable[..., Any], given: Arguments) -> Any:
        """Calls the function, in the context of the only replica."""
        with self._placement(), context.replica_scope(strategy.sole_replica_context):
            return _sole_components(given).call(function)

    def reduce(self, op: ReduceOp, value: Any, axis: int | None) -> Any:
        """Returns the value, reduced along an axis."""
        from kerasdist.keras_compat import (
            ops,  # not at the top: the default strategy works before Keras is imported
        )

        value = _sole_components(value)
        if axis is None:
            return value
        value = ops.convert_to_tensor(value)
        axis = checked_axis(value, axis)
        if op is ReduceOp.SUM:
            return ops.sum(value, axis=axis)
        if "float64" in str(value.dtype):
            # Keras's mean computes in float32, except on TensorFlow (3.15.1).
            return ops.sum(value, axis=axis) / ops.shape(value)[axis]
        return ops.mean(value, axis=axis)

    def gather(self, value: Any, axis: int) -> Any:
        """Returns the value."""
        value = _sole_components(value)
        checked_axis(value, axis)
        return value

    def reduce_to(
        self, op: ReduceOp, values: Sequence[Any], options: CommunicationOptions
    ) -> list[Any]:
        """Returns the values."""
        return _sole_components(list(values))

    def broadcast(self, tensor: Any) -> Any:
        """Returns the tensor."""
        return tensor

    def update(
        self, variable: keras.Variable, function: Callable[..., Any], given: Arguments
    ) -> Sequence[Any]:
        """Calls the function for the variable."""
        return [_sole_components(given).call(function, variable)]

    def per_replica(self, values: Sequence[Any]) -> Any:
        """Returns the only value; arrays become tensors, on the replica's device."""
        from kerasdist.keras_compat import ops

        def placed(leaf: object) -> Any:
            return ops.convert_to_tensor(leaf) if isinstance(leaf, _ARRAYS) else leaf

        with self._placement():
            return map_leaves(placed, values[0])

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns a tuple of the value."""
        return value.values if isinstance(value, DistributedValues) else (value,)

    def read(self, variable: keras.Variable) -> Any:
        """Returns the variable's value."""
        from kerasdist.keras_compat import ops

        return ops.convert_to_tensor(variable)

    def created(self, variable: keras.Variable) -> bool:
        """Returns True: with one replica, any variable can be used."""
        return True


_ARRAYS = (np.ndarray, np.generic)


def _sole_components(structure: object) -> Any:
    for leaf in flatten(structure):
        if isinstance(leaf, DistributedValues) and len(leaf.values) != 1:
            raise ValueError(
                "Expected values of this strategy's 1 replica. Received: a "
                f"{type(leaf).__name__} of {len(leaf.values)} components. Values cannot go from "
                "one strategy to another: pass tensors, such as strategy.gather returns."
            )
    return component(structure, 0)
