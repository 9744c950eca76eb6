"""How the code of one replica reaches the others: by the name of the mesh axis."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
from jax import numpy as jnp

from kerasdist.backends.checks import check_summable
from kerasdist.backends.jax.layout import AXIS


@dataclass(frozen=True)
class Differentiated:
    """A function's value and derivatives.

    Attributes:
        value: The value.
        gradients: One for each value that it was differentiated by.
        parts: Arrays that came with the value.
        notes: What else is known of the call.
    """

    value: Any
    gradients: list[Any]
    parts: Any
    notes: Any


class Exchange(abc.ABC):
    """What the replicas tell each other; all must make the same calls.

    Attributes:
        base: The scope of the code that makes them.
    """

    base: Any = None

    @abc.abstractmethod
    def total(self, tensors: Sequence[Any]) -> list[Any]:
        """Returns each tensor summed over the replicas.

        Args:
            tensors: This replica's.
        """

    @abc.abstractmethod
    def gather(self, tensor: Any, axis: int) -> Any:
        """Returns the replicas' tensors one after another.

        Args:
            tensor: This replica's.
            axis: The axis to join them along.
        """

    @abc.abstractmethod
    def merge(self, scope: Any, leaves: Sequence[Any], call: Callable[[list[Any]], Any]) -> Any:
        """Calls a function once for all replicas.

        Args:
            scope: This replica's variables.
            leaves: This replica's arguments.
            call: Takes what stands for the arguments of all.
        """

    def differentiated(
        self, scope: Any, alone: Callable[[], Differentiated], joint: Any, by: Any
    ) -> Differentiated:
        """Differentiates a function that may exchange values.

        Args:
            scope: This replica's variables.
            alone: Does it, where exchanges are as good as any other operation.
            joint: For who does it otherwise: makes a scope of values to differentiate by, and calls
                the function in it.
            by: The values.
        """
        del scope, joint, by
        return alone()

    def first(self, tensor: Any) -> Any:
        """Returns replica 0's tensor.

        Args:
            tensor: This replica's.
        """
        [chosen] = self.total([only_first(tensor)])
        return chosen.astype(tensor.dtype)


@final
class ByName(Exchange):
    """Collectives of JAX, which differentiates a sum by name to a sum by name."""

    def total(self, tensors: Sequence[Any]) -> list[Any]:
        """Sums all tensors in one go."""
        for tensor in tensors:
            check_is_number(tensor)
        return list(jax.lax.psum(list(tensors), AXIS)) if tensors else []

    def gather(self, tensor: Any, axis: int) -> Any:
        """Gathers pieces of one size: there is one program."""
        return jax.lax.all_gather(tensor, AXIS, axis=axis, tiled=True)

    def merge(self, scope: Any, leaves: Sequence[Any], call: Callable[[list[Any]], Any]) -> Any:
        """Calls the function where the replica stands."""
        del scope
        return call(list(leaves))


def only_first(tensor: Any) -> Any:
    """Returns what sums over the replicas to replica 0's tensor, booleans as numbers.

    Args:
        tensor: This replica's.
    """
    number = tensor.astype("int8") if tensor.dtype == bool else tensor
    return jnp.where(jax.lax.axis_index(AXIS) == 0, number, jnp.zeros_like(number))


def check_is_number(tensor: Any) -> None:
    """Refuses booleans, of which backends make different sums.

    Args:
        tensor: A tensor that is to be summed.

    Raises:
        TypeError: If it is boolean.
    """
    check_summable(tensor.dtype.name)
