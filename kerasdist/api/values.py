"""Values that have a component on every replica.

`Strategy.run` returns such values, and distributed datasets yield them. On TensorFlow, kerasdist
accepts and returns the distributed values of ``tf.distribute``, and ``isinstance`` counts them as
instances of the classes of this module.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, final

from kerasdist.core.structures import flatten, map_leaves, transpose


class DistributedValues(abc.ABC):  # noqa: B024  an ABC, to register TensorFlow's classes
    """A value with one component per replica.

    Do not create instances yourself: `Strategy.run` and
    `Strategy.experimental_distribute_values_from_function` return them.

    Example::

        values = strategy.run(lambda: keras.ops.ones((2,)))
        parts = strategy.experimental_local_results(values)  # one tensor per replica

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/DistributedValues

    Attributes:
        source: The sequence of components from which the value was made.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        """Stores the components. A lazy sequence may fetch each component when it is first read."""
        self.source = values

    @property
    def values(self) -> tuple[Any, ...]:
        """The components of the replicas of this process, in the order of the replicas."""
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
    """A value whose components may differ, such as local batches, or the losses of the replicas.

    Example::

        values = strategy.run(lambda: keras.ops.ones((2,)))
        assert isinstance(values, kd.PerReplica)
    """


@final
class Mirrored(DistributedValues):
    """A value whose components are equal, such as the result of `StrategyExtended.reduce_to`.

    Example::

        ones = strategy.run(lambda: keras.ops.ones((2,)))
        total = strategy.extended.reduce_to("SUM", ones, destinations="cpu:0")
    """


def component(structure: object, index: int) -> Any:
    """Returns a structure with one replica's component in place of each distributed value."""
    return map_leaves(
        lambda leaf: leaf.values[index] if isinstance(leaf, DistributedValues) else leaf, structure
    )


def equal_component(leaf: object) -> Any:
    """Returns a component of a `Mirrored` value; raises ValueError for a `PerReplica`.

    Any other value is returned unchanged.
    """
    if isinstance(leaf, PerReplica):
        raise ValueError(
            "Expected arguments that are equal on all devices. Received: a PerReplica value. "
            "Reduce it by strategy.reduce, or use strategy.extended.update(variable, fn, args)."
        )
    return leaf.values[0] if isinstance(leaf, Mirrored) else leaf


def require_one_each(value: object, count: int, replicas: int) -> None:
    """Raises ValueError if a value does not have exactly one component per replica."""
    if count != replicas:
        raise ValueError(
            f"Expected a value with a component for each of the {replicas} replicas here. "
            f"Received: a {type(value).__name__} of {count} components. A value of one strategy "
            "cannot be used with another: make the value with this strategy, or pass a tensor, "
            "such as strategy.gather returns."
        )


def sole_component(structure: object) -> Any:
    """Returns a structure in which each distributed value is replaced by its only component."""
    for leaf in flatten(structure):
        if isinstance(leaf, DistributedValues):
            require_one_each(leaf, len(leaf.values), 1)
    return component(structure, 0)


def per_replica(
    structures: Sequence[Any], value: Callable[[Sequence[Any]], Any] = PerReplica
) -> Any:
    """Combines the structures of all replicas into one structure of distributed values.

    `value` makes a distributed value from its components. A leaf that is the same object on all
    replicas stays as it is.
    """

    def merged(leaves: Sequence[Any]) -> Any:
        first = leaves[0]
        return first if all(leaf is first for leaf in leaves) else value(tuple(leaves))

    return transpose(structures, merged)
