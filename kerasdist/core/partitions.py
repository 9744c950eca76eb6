"""Several devices per replica: how many, and the part of a tensor that each of them holds.

Integer arithmetic without a framework. The devices of a replica are its logical devices; their
number is a product of primes, each an axis of a mesh. So every way to cut a tensor into that many
shards assigns axes of the mesh to axes of the tensor.
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

    Example::

        assignment = kd.DeviceAssignment.build(num_replicas=1, computation_shape=[2])
        strategy = kd.TPUStrategy(experimental_device_assignment=assignment)

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
    """Which variables are cut into shards, by patterns of their paths.

    Attributes:
        logical_devices: Number of logical devices of a replica.
        rules: For each pattern, searched for in a variable's path, the number of shards along each
            axis. The first that fits counts.
    """

    logical_devices: int
    rules: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def add(self, rules: Mapping[str, Sequence[int]]) -> None:
        """Adds rules, patterns with the number of shards along each axis, after the others."""
        for pattern, shards in rules.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    "Expected patterns that are regular expressions. "
                    f"Received: pattern={pattern!r}: {error}."
                ) from error
            check_product(shards, self.logical_devices)
            self.rules[pattern] = tuple(shards)

    def shards_of(self, path: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the number of shards of a variable along each axis; all 1 if it is whole."""
        for pattern, shards in self.rules.items():
            if re.search(pattern, path):
                check_partition(shape, shards, self.logical_devices, of=f"variable {path!r}")
                return shards
        return (1,) * len(shape)


def check_partition(
    shape: Sequence[int | None], shards: Sequence[int], logical_devices: int, *, of: str = "tensor"
) -> None:
    """Raises ValueError if a tensor cannot be cut so.

    It needs one number of shards per axis, which multiply to the number of logical devices, and
    axes that can be cut evenly. A size that is not known is None. ``of`` names the tensor in the
    message.
    """
    if len(shards) != len(shape):
        raise ValueError(
            f"Expected one number of shards for each of the {len(shape)} axes of the {of}. "
            f"Received: partition_dimensions={tuple(shards)}, shape={tuple(shape)}."
        )
    check_product(shards, logical_devices)
    uneven = [
        axis
        for axis, (size, count) in enumerate(zip(shape, shards, strict=True))
        if size is not None and size % count
    ]
    if uneven:
        raise ValueError(
            f"Expected axes of the {of} that can be cut into equal shards. Received: "
            f"partition_dimensions={tuple(shards)}, shape={tuple(shape)}, uneven along {uneven}."
        )


def check_product(shards: Sequence[int], logical_devices: int) -> None:
    """Raises ValueError if the shards do not multiply to the number of logical devices."""
    if math.prod(shards) != logical_devices or any(count < 1 for count in shards):
        raise ValueError(
            "Expected numbers of shards that multiply to the number of logical devices of a "
            f"replica, {logical_devices}. Received: partition_dimensions={tuple(shards)}."
        )


def prime_factors(number: int) -> tuple[int, ...]:
    """Returns the prime factors of a number, the smallest first; none of 1."""
    factors: list[int] = []
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return tuple(factors)


def mesh_axes(shards: Sequence[int], factors: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns for each axis of a tensor the axes of the mesh that cut it.

    The shards multiply to the product of the factors, which are the sizes of the mesh's axes; or
    all shards are 1.
    """
    free = list(range(len(factors)))
    result: list[tuple[int, ...]] = []
    for count in shards:
        taken: list[int] = []
        for prime in prime_factors(count):
            axis = next(axis for axis in free if factors[axis] == prime)
            free.remove(axis)
            taken.append(axis)
        result.append(tuple(taken))
    return tuple(result)
