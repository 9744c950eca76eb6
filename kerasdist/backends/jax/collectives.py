"""What the code of one replica can ask of the others: collectives by name, in one program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final

import jax

from kerasdist import context, keras_seam
from kerasdist.backends.collectives import DEFAULT_COMMUNICATION, Apply, Collectives
from kerasdist.backends.jax.arrays import is_array
from kerasdist.backends.jax.components import divided
from kerasdist.backends.jax.replica_scope import ReplicaScope
from kerasdist.backends.jax.sources import Own, flatten, own
from kerasdist.collectives import CommunicationOptions
from kerasdist.values import PerReplica

if TYPE_CHECKING:
    from kerasdist.strategy import Strategy


@final
class JaxCollectives(Collectives):
    """Collectives between the replicas of a program that is traced once for all of them."""

    def __init__(self, scope: ReplicaScope, replicas: int) -> None:
        """Makes the collectives.

        Args:
            scope: The variables of the replica.
            replicas: How many replicas there are.
        """
        self._scope = scope
        self._replicas = replicas
        self._applies = False

    def merge_call(
        self,
        strategy: Strategy,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls the function, with values whose components the other replicas hold."""
        leaves, structure = flatten((tuple(args), dict(kwargs)))

        def merged(leaves: list[Any]) -> Any:
            values = [
                PerReplica(Own(leaf, self._replicas)) if is_array(leaf) else leaf for leaf in leaves
            ]
            args, kwargs = jax.tree.unflatten(structure, values)
            with context.replica_scope(None):
                return own(function(strategy, *args, **kwargs))

        return self._scope.exchange.merge(self._scope, leaves, merged)

    def all_sum(
        self, tensors: Sequence[Any], options: CommunicationOptions = DEFAULT_COMMUNICATION
    ) -> list[Any]:
        """Sums all tensors in one go."""
        del options
        return self._scope.exchange.total(list(map(keras_seam.ops.convert_to_tensor, tensors)))

    def mean_of_sum(self, total: Any, replicas: int) -> Any:
        """Returns a sum divided by the number of replicas, in its type."""
        return divided(total, replicas)

    def all_gather(self, tensor: Any, axis: int = 0) -> Any:
        """Gathers along an axis."""
        return self._scope.exchange.gather(keras_seam.ops.convert_to_tensor(tensor), axis)

    def equal_writes(self) -> AbstractContextManager[None]:
        """Says that what is assigned inside is equal on all replicas."""
        return self._scope.equal_writes()

    def apply_gradients(
        self, apply: Apply, optimizer: Any, gradients: list[Any], variables: list[Any] | None
    ) -> Any:
        """Sums gradients over the replicas; then each of them makes the same update."""
        if self._applies:  # an optimizer inside of another
            return apply(optimizer, gradients, variables)
        known = keras_seam.optimized_variables(optimizer) if variables is None else variables
        # A variable's next value in the place of a gradient, as float8 scales: the largest counts.
        replaced = {
            index for index, variable in enumerate(known) if variable.overwrite_with_gradient
        }
        added = [
            gradient
            for index, gradient in enumerate(gradients)
            if gradient is not None and index not in replaced
        ]
        sums = iter(self.all_sum(added))

        def combined(index: int, gradient: Any) -> Any:
            if gradient is None:
                return None
            if index in replaced:
                return keras_seam.ops.max(self.all_stack(gradient), axis=0)
            return next(sums)

        gradients = [combined(*numbered) for numbered in enumerate(gradients)]
        self._applies = True
        try:
            with self._scope.equal_writes():
                return apply(optimizer, gradients, variables)
        finally:
            self._applies = False
