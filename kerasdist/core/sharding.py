"""Which state the replicas of a strategy divide among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final, get_args

Divided = Literal["optimizer", "full"]

DEFAULT_MIN_SIZE = 2**16


@final
@dataclass(frozen=True)
class Sharding:
    """Which variables the replicas divide among them, so that a larger model fits.

    Pass it as ``sharding=`` to a strategy. The names alone, ``"optimizer"`` and ``"full"``, stand
    for it with the default `min_size`.

    Example::

        strategy = kd.MirroredStrategy(sharding=kd.Sharding("full", min_size=2**12))

    Attributes:
        state: ``"optimizer"``: the optimizer's variables (ZeRO, stages 1 and 2). ``"full"``: also
            the weights, which are gathered where a layer uses them (ZeRO, stage 3; FSDP).
        min_size: A variable with fewer elements stays whole on each replica. On JAX so does one
            of which no dimension can be divided by the number of replicas; of the others the
            largest such dimension is divided. PyTorch divides the flattened values.
    """

    state: Divided
    min_size: int = DEFAULT_MIN_SIZE

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ValueError: If `state` is none of its values, or `min_size` is no positive number.
        """
        if self.state not in get_args(Divided):
            raise ValueError(
                f"Expected state to be one of {list(get_args(Divided))}. "
                f"Received: state={self.state!r}."
            )
        if not isinstance(self.min_size, int) or self.min_size < 1:
            raise ValueError(
                "Expected min_size to be a number of elements, at least 1. "
                f"Received: min_size={self.min_size!r}."
            )

    def axis(self, shape: Sequence[int], replicas: int) -> int | None:
        """Returns the axis along which a variable is divided, None if it stays whole.

        Args:
            shape: The variable's.
            replicas: How many replicas divide it.
        """
        even = [axis for axis, size in enumerate(shape) if size and size % replicas == 0]
        if math.prod(shape) < self.min_size or not even:
            return None
        return max(even, key=lambda axis: shape[axis])
