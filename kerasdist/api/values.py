"""Values that have a component on every replica.

What `Strategy.run` returns, and what distributed datasets yield. On TensorFlow the framework's own
values pass for these (``isinstance`` says so), and go in and out as they are.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, final

from kerasdist.core.structures import flatten, map_leaves, transpose


class DistributedValues(abc.ABC):  # noqa: B024  abstract, so that TensorFlow's can be registered
    """A value with one component per replica.

    Not made directly: see `Strategy.run` and
    `Strategy.experimental_distribute_values_from_function`.

    Example::

        values = strategy.run(lambda: keras.ops.ones((2,)))
        parts = strategy.experimental_local_results(values)  # one tensor per replica

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/DistributedValues

    Attributes:
        source: The object that the value was made from, in which backends hold the components.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        """Takes the components; the sequence may fetch each when it is read."""
        self.source = values

    @property
    def values(self) -> tuple[Any, ...]:
        """The components on this machine, replica 0's first."""
        return tuple(self.source)

    def __str__(self) -> str:
        return self._printed(str)

    def __repr__(self) -> str:
        return self._printed(repr)

    def _printed(self, form: Callable[[Any], str]) -> str:
        rows = ",\n".join(f"  {index}: {form(value)}" for index, value in enumerate(self.values))
        return f"{type(self).__name__}:{{\n{rows}\n}}"


@final
class PerReplica(DistributedValues):
    """A value whose components may differ: the local batches of a batch, the losses of replicas.

    Example::

        values = strategy.run(lambda: keras.ops.ones((2,)))
        assert isinstance(values, kd.PerReplica)
    """


@final
class Mirrored(DistributedValues):
    """A value whose components are equal: the result of a reduction to every device.

    Example::

        ones = strategy.run(lambda: keras.ops.ones((2,)))
        total = strategy.extended.reduce_to("SUM", ones, destinations="cpu:0")
    """


def component(structure: object, index: int) -> Any:
    """Returns a structure in which each distributed value is replaced by a replica's component."""
    return map_leaves(
        lambda leaf: leaf.values[index] if isinstance(leaf, DistributedValues) else leaf, structure
    )


def equal_component(leaf: object) -> Any:
    """Returns a component of a value whose components are equal; anything else as it is."""
    if isinstance(leaf, PerReplica):
        raise ValueError(
            "Expected arguments that are equal on all devices. Received: a PerReplica value. "
            "Reduce it by strategy.reduce, or use strategy.extended.update(variable, fn, args)."
        )
    return leaf.values[0] if isinstance(leaf, Mirrored) else leaf


def sole_component(structure: object) -> Any:
    """Returns a structure in which each distributed value is replaced by its only component."""
    for leaf in flatten(structure):
        if isinstance(leaf, DistributedValues) and len(leaf.values) != 1:
            raise ValueError(
                "Expected values of this strategy's 1 replica. Received: a "
                f"{type(leaf).__name__} of {len(leaf.values)} components. Values cannot go from "
                "one strategy to another: pass tensors, such as strategy.gather returns."
            )
    return component(structure, 0)


def per_replica(structures: Sequence[Any]) -> Any:
    """Returns one structure of `PerReplica` values from one structure per replica.

    A leaf that is the same object in all replicas stays itself.
    """
    return transpose(structures, _merged)


def _merged(leaves: Sequence[Any]) -> Any:
    first = leaves[0]
    return first if all(leaf is first for leaf in leaves) else PerReplica(tuple(leaves))
