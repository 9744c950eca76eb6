"""Collectives between the replicas of one program, over the mesh's axis of replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final

import jax

from kerasdist import keras_compat
from kerasdist.api.options import CommunicationOptions
from kerasdist.api.values import PerReplica
from kerasdist.backends.base.collectives import DEFAULT_COMMUNICATION, Apply, Collectives, Variables
from kerasdist.backends.jax.loops.components import divide
from kerasdist.backends.jax.loops.replica_scope import ReplicaScope
from kerasdist.backends.jax.loops.values import Own, flatten, own
from kerasdist.backends.jax.mesh.arrays import is_array
from kerasdist.core import context
from kerasdist.core.structures import Arguments

if TYPE_CHECKING:
    import keras

    from kerasdist.api.strategy import Strategy


@final
class JaxCollectives(Collectives):
    """Collectives between the replicas of a program that is traced once for all of them."""

    def __init__(self, scope: ReplicaScope, replicas: int) -> None:
        self._scope = scope
        self._replicas = replicas
        self._applies = False

    def merge_call(self, strategy: Strategy, function: Callable[..., Any], given: Arguments) -> Any:
        """Calls the function with distributed values, of which this replica holds a component."""
        leaves, structure = flatten(given)

        def merged(leaves: list[Any]) -> Any:
            values = [
                PerReplica(Own(leaf, self._replicas)) if is_array(leaf) else leaf for leaf in leaves
            ]
            with context.replica_scope(None):
                return own(jax.tree.unflatten(structure, values).call(function, strategy))

        return self._scope.exchange.merge(self._scope, leaves, merged)

    def all_sum(
        self, tensors: Sequence[Any], options: CommunicationOptions = DEFAULT_COMMUNICATION
    ) -> list[Any]:
        """Sums each tensor over the replicas, all of them in one collective."""
        return self._scope.exchange.total(list(map(keras_compat.ops.convert_to_tensor, tensors)))

    def mean_of_sum(self, total: Any, replicas: int) -> Any:
        """Returns a sum divided by the number of replicas, in the sum's type."""
        return divide(total, replicas)

    def all_gather(self, tensor: Any, axis: int = 0) -> Any:
        """Returns the replicas' tensors concatenated along an axis."""
        return self._scope.exchange.gather(keras_compat.ops.convert_to_tensor(tensor), axis)

    def equal_writes(self) -> AbstractContextManager[None]:
        """Returns a context in which all replicas assign equal values, so that none is sent."""
        return self._scope.writing("equal")

    def apply_gradients(
        self, apply: Apply, optimizer: keras.Optimizer, gradients: list[Any], variables: Variables
    ) -> Any:
        """Sums gradients over the replicas; then each replica makes the same update."""
        if self._applies:  # a wrapping optimizer has summed them
            return apply(optimizer, gradients, variables)
        known = keras_compat.optimized_variables(optimizer) if variables is None else variables
        # The gradient of a float8 scale and its like is its next value: take the maximum.
        replaced = {
            index for index, variable in enumerate(known) if variable.overwrite_with_gradient
        }
        added = [
            gradient
            for index, gradient in enumerate(gradients)
            if gradient is not None and index not in replaced
        ]
        sums = iter(self.all_sum(added))

        def combined(index: int, gradient: object) -> Any:
            if gradient is None:
                return None
            if index in replaced:
                return keras_compat.ops.max(self.all_stack(gradient), axis=0)
            return next(sums)

        gradients = [combined(*numbered) for numbered in enumerate(gradients)]
        self._applies = True
        try:
            with self._scope.writing("equal"):
                return apply(optimizer, gradients, variables)
        finally:
            self._applies = False
