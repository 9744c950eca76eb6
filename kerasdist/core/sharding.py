"""Options for sharding a model's state over replicas, and descriptions of a worker's shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final, get_args

if TYPE_CHECKING:
    import numpy as np

Divided = Literal["optimizer", "full", "auto"]
Offload = Literal["optimizer"]
Within = Literal["host"]

DEFAULT_MIN_SIZE = 2**16

GROUP_BYTES = 25 * 2**20
"""Small weights are put into groups of about this many bytes, as in buckets of PyTorch's DDP."""


@final
@dataclass(frozen=True)
class Sharding:
    """Which variables the replicas divide among themselves, so that a larger model fits.

    Pass an object of this class as ``sharding=`` to a strategy. In place of the object, the names
    ``"optimizer"``, ``"full"`` and ``"auto"`` mean the corresponding `Sharding` with the default
    `min_size`.

    Example::

        strategy = kd.MirroredStrategy(sharding=kd.Sharding("full", min_size=2**12))

    Attributes:
        state: ``"optimizer"``: the replicas divide the optimizer's variables (ZeRO, stages 1 and
            2). ``"full"``: they also divide the weights, which are gathered when a layer uses them
            (ZeRO, stage 3; FSDP). ``"auto"`` is like ``"full"``, but on JAX it uses the layout map
            of the model's class, if the class has one (``get_layout_map``, as in backbones of
            KerasHub). A weight that the layout map names is sharded along the dimension to which
            the map assigns the mesh axis ``"batch"``, if that dimension can be split evenly.
        min_size: A variable with fewer elements stays whole on each replica. On JAX a variable also
            stays whole if none of its dimensions is a multiple of the number of replicas. If there
            are several such dimensions, JAX shards the largest of them. PyTorch shards the
            flattened values.
        within: ``"host"``: the devices of one machine divide the variables, and every machine holds
            all variables (hybrid sharding, HSDP). Devices then gather weights only from devices of
            their own machine, and machines send each other only sums of gradient shards. None: the
            devices of all machines divide the variables.
    """

    state: Divided
    min_size: int = DEFAULT_MIN_SIZE
    within: Within | None = None

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ValueError: If `state` or `within` has none of the allowed values, or `min_size` is not
                a positive number.
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
        if self.within not in (None, *get_args(Within)):
            raise ValueError(
                f"Expected within to be None or one of {list(get_args(Within))}. "
                f"Received: within={self.within!r}."
            )

    @property
    def divides_weights(self) -> bool:
        """Whether the replicas divide the weights as well as the optimizer's variables."""
        return self.state != "optimizer"

    def axis(self, shape: Sequence[int], replicas: int, wanted: int | None = None) -> int | None:
        """Returns the axis along which a variable is sharded, None if it is not sharded.

        Args:
            shape: The shape of the variable.
            replicas: How many replicas divide the variable.
            wanted: An axis to take in place of the largest one, if its size is a multiple of
                `replicas`.
        """
        even = [axis for axis, size in enumerate(shape) if size and size % replicas == 0]
        if self.is_small(shape) or not even:
            return None
        return wanted if wanted in even else max(even, key=lambda axis: shape[axis])

    def is_small(self, shape: Sequence[int]) -> bool:
        """Returns whether a variable of this shape is too small to be sharded."""
        return math.prod(shape) < self.min_size

    @property
    def small(self) -> str:
        """The reason why a small variable stays whole, for a table of the model's variables."""
        return f"fewer than {self.min_size:,} elements"


def is_small(sharding: object, shape: Sequence[int]) -> bool:
    """Returns whether a variable is so small that it stays on the device under ``offload``.

    `sharding` is the strategy's argument of that name. If it is a `Sharding`, its `min_size` is the
    limit; otherwise `DEFAULT_MIN_SIZE` is.
    """
    least = sharding.min_size if isinstance(sharding, Sharding) else DEFAULT_MIN_SIZE
    return math.prod(shape) < least


@final
@dataclass(frozen=True)
class Region:
    """The elements of a variable that belong to a shard.

    To describe the region, the variable is reshaped to a matrix. The shard consists of some
    neighbouring columns of this matrix. If the variable is sharded along an axis, the axes before
    that axis become the rows, and that axis and the axes after it become the columns. If the
    flattened values are sharded, the matrix has one row.

    Attributes:
        rows: The number of rows of the matrix.
        begin: The shard's first column.
        end: The column after the shard's last column.
    """

    rows: int
    begin: int
    end: int

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """Returns the region of a shard that is the whole variable."""
        return cls(1, 0, math.prod(shape))

    @classmethod
    def along(cls, shape: Sequence[int], axis: int, begin: int, end: int) -> Region:
        """Returns the region of a shard that has the indices `begin` to `end - 1` of one axis."""
        inner = math.prod(shape[axis + 1 :])
        return cls(math.prod(shape[:axis]), begin * inner, end * inner)

    @property
    def size(self) -> int:
        """How many elements the region has."""
        return self.rows * (self.end - self.begin)


@final
@dataclass(frozen=True)
class HeldShard:
    """A shard of a variable that this worker holds, with functions to read and write the shard.

    Attributes:
        region: Which elements of the variable the shard has.
        dtype: The name of the elements' type.
        read: A function that returns the shard's elements, as a NumPy array of any shape.
        write: A function that replaces the shard's elements by the elements of a NumPy array of any
            shape.
        is_first: Whether backups save the shard from this worker. If several workers hold copies of
            the same shard, only one of them saves the shard.
        path: The path of the variable, for error messages.
    """

    region: Region
    dtype: str
    read: Callable[[], np.ndarray[Any, Any]]
    write: Callable[[np.ndarray[Any, Any]], None]
    is_first: bool = True
    path: str = ""


def scaled(value: float) -> tuple[float, str]:
    """Returns a number in a larger unit, with the unit's prefix: 1.5e9 gives ``(1.5, "G")``."""
    for prefix in ("", "k", "M", "G"):
        if abs(value) < 1000:
            return value, prefix
        value /= 1000
    return value, "T"


def size(value: float) -> str:
    """Returns a number of bytes as a text, such as ``"1.5 GB"``."""
    number, prefix = scaled(value)
    return f"{number:.3g} {prefix}B" if prefix else f"{number:.0f} B"
