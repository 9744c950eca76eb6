"""Several devices for one replica: how many, and which part of a tensor each of them holds.

Integer arithmetic without a framework. The devices of a replica are its logical devices; their
number is a product of primes, each an axis of a mesh, so that any way to cut a tensor into as many
pieces is a way to give axes of the mesh to axes of the tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final


@final
@dataclass(frozen=True)
class DeviceAssignment:
    """How many replicas there are, and how many devices each of them has.

    Source: https://www.tensorflow.org/api_docs/python/tf/tpu/experimental/DeviceAssignment

    Attributes:
        num_replicas: Number of replicas.
        computation_shape: How a replica's devices are laid out; only their number matters here.
    """

    num_replicas: int
    computation_shape: tuple[int, ...]

    @classmethod
    def build(
        cls, num_replicas: int = 1, computation_shape: Sequence[int] = (1,)
    ) -> DeviceAssignment:
        """Makes an assignment.

        Args:
            num_replicas: Number of replicas.
            computation_shape: Number of devices of a replica along each axis of their layout.

        Raises:
            ValueError: If one of the numbers is not positive.
        """
        if num_replicas < 1 or not computation_shape or min(computation_shape) < 1:
            raise ValueError(
                "Expected positive numbers of replicas and of devices. Received: "
                f"num_replicas={num_replicas}, computation_shape={tuple(computation_shape)}."
            )
        return cls(num_replicas, tuple(computation_shape))

    @property
    def num_cores_per_replica(self) -> int:
        """Number of logical devices of a replica."""
        return math.prod(self.computation_shape)


@final
@dataclass
class Splits:
    """Which variables are cut into pieces, by patterns of their paths.

    Attributes:
        logical_devices: Number of logical devices of a replica.
        rules: For each pattern, searched for in a variable's path, the number of pieces along each
            axis. The first that fits counts.
    """

    logical_devices: int
    rules: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def add(self, rules: Mapping[str, Sequence[int]]) -> None:
        """Adds rules, after those that are there.

        Args:
            rules: Patterns, and the number of pieces along each axis.

        Raises:
            ValueError: If a pattern is no regular expression, or the numbers of pieces do not
                multiply to the number of logical devices.
        """
        for pattern, pieces in rules.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    "Expected patterns that are regular expressions. "
                    f"Received: pattern={pattern!r}: {error}."
                ) from error
            check_product(pieces, self.logical_devices)
            self.rules[pattern] = tuple(pieces)

    def pieces_of(self, path: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns into how many pieces a variable is cut along each axis; all 1 if it is whole.

        Args:
            path: The variable's path.
            shape: Its shape.

        Raises:
            ValueError: If a rule does not fit the shape.
        """
        for pattern, pieces in self.rules.items():
            if re.search(pattern, path):
                check_partition(shape, pieces, self.logical_devices, of=f"variable {path!r}")
                return pieces
        return (1,) * len(shape)


def check_partition(
    shape: Sequence[int | None], pieces: Sequence[int], logical_devices: int, *, of: str = "tensor"
) -> None:
    """Refuses a way to cut a tensor.

    Args:
        shape: The tensor's shape; None for a size that is not known.
        pieces: Number of pieces along each axis.
        logical_devices: Number of logical devices of a replica.
        of: What is cut, for the message.

    Raises:
        ValueError: If there is not one number an axis, if they do not multiply to the number of
            logical devices, or if an axis cannot be cut evenly.
    """
    if len(pieces) != len(shape):
        raise ValueError(
            f"Expected one number of pieces for each of the {len(shape)} axes of the {of}. "
            f"Received: partition_dimensions={tuple(pieces)}, shape={tuple(shape)}."
        )
    check_product(pieces, logical_devices)
    uneven = [
        axis
        for axis, (size, count) in enumerate(zip(shape, pieces, strict=True))
        if size is not None and size % count
    ]
    if uneven:
        raise ValueError(
            f"Expected axes of the {of} that can be cut into equal pieces. Received: "
            f"partition_dimensions={tuple(pieces)}, shape={tuple(shape)}, uneven along {uneven}."
        )


def check_product(pieces: Sequence[int], logical_devices: int) -> None:
    """Refuses numbers of pieces that do not fit the number of devices.

    Args:
        pieces: Number of pieces along each axis.
        logical_devices: Number of logical devices of a replica.

    Raises:
        ValueError: If they do not multiply to the number of logical devices.
    """
    if math.prod(pieces) != logical_devices or any(count < 1 for count in pieces):
        raise ValueError(
            "Expected numbers of pieces that multiply to the number of logical devices of a "
            f"replica, {logical_devices}. Received: partition_dimensions={tuple(pieces)}."
        )


def prime_factors(number: int) -> tuple[int, ...]:
    """Returns the prime factors of a number, the smallest first; of 1 none.

    Args:
        number: At least 1.
    """
    factors: list[int] = []
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return tuple(factors)


def mesh_axes(pieces: Sequence[int], factors: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns for each axis of a tensor the axes of the mesh that cut it.

    Args:
        pieces: Number of pieces along each axis of the tensor; they multiply to the product of the
            factors, or are all 1.
        factors: Sizes of the mesh's axes, primes.
    """
    free = list(range(len(factors)))
    result: list[tuple[int, ...]] = []
    for count in pieces:
        taken: list[int] = []
        for prime in prime_factors(count):
            axis = next(axis for axis in free if factors[axis] == prime)
            free.remove(axis)
            taken.append(axis)
        result.append(tuple(taken))
    return tuple(result)
