"""How replica code exchanges values with other replicas: by collectives over the mesh axis."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
from jax import numpy as jnp

from kerasdist.backends.base.checks import check_summable
from kerasdist.backends.jax.mesh.layout import AXIS


@dataclass(frozen=True)
class Differentiated:
    """A function's value and derivatives.

    Attributes:
        value: The value.
        gradients: One for each value that it was differentiated by.
        parts: Arrays that the function returned beside the value.
        notes: Python objects of the call, such as its scope.
    """

    value: Any
    gradients: list[Any]
    parts: Any
    notes: Any


class Exchange(abc.ABC):
    """Exchanges values between the replicas, which must all make the same calls.

    Attributes:
        base: The scope of the code that makes these calls.
    """

    base: Any = None

    @abc.abstractmethod
    def total(self, tensors: Sequence[Any]) -> list[Any]:
        """Returns each tensor summed over the replicas."""

    @abc.abstractmethod
    def gather(self, tensor: Any, axis: int) -> Any:
        """Returns the replicas' tensors concatenated along an axis."""

    @abc.abstractmethod
    def merge(self, scope: Any, leaves: Sequence[Any], call: Callable[[list[Any]], Any]) -> Any:
        """Calls a function once for all replicas."""

    def differentiated(
        self, scope: Any, alone: Callable[[], Differentiated], joint: Any, by: Any
    ) -> Differentiated:
        """Differentiates a function that may exchange values; here simply by `alone`."""
        del scope, joint, by
        return alone()

    def first(self, tensor: Any) -> Any:
        """Returns replica 0's tensor."""
        [chosen] = self.total([only_first(tensor)])
        return chosen.astype(tensor.dtype)


@final
class ByName(Exchange):
    """JAX's own collectives over the mesh axis; JAX differentiates a `psum` to a `psum`."""

    def total(self, tensors: Sequence[Any]) -> list[Any]:
        """Sums each tensor over the replicas, all of them in one `psum`."""
        for tensor in tensors:
            check_summable(tensor.dtype.name)
        return list(jax.lax.psum(list(tensors), AXIS)) if tensors else []

    def gather(self, tensor: Any, axis: int) -> Any:
        """Concatenates the replicas' tensors, which have the same shape in one program."""
        return jax.lax.all_gather(tensor, AXIS, axis=axis, tiled=True)

    def merge(self, scope: Any, leaves: Sequence[Any], call: Callable[[list[Any]], Any]) -> Any:
        """Calls the function inline: JAX traces it once, for all replicas."""
        del scope
        return call(list(leaves))


def only_first(tensor: Any) -> Any:
    """Returns the tensor on replica 0, zeros elsewhere, to be summed; booleans become int8."""
    number = tensor.astype("int8") if tensor.dtype == bool else tensor
    return jnp.where(is_first(), number, jnp.zeros_like(number))


def is_first() -> Any:
    """Returns whether this device belongs to replica 0, as a traced boolean."""
    return jax.lax.axis_index(AXIS) == 0
