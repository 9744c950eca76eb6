"""Checks that all backends make of what a caller gives them."""

from __future__ import annotations

from typing import Any


def check_summable(dtype: str) -> None:
    """Refuses to add booleans over the replicas, of which frameworks make different sums.

    Args:
        dtype: The name of the type of what is to be added.

    Raises:
        TypeError: If it is boolean.
    """
    if dtype == "bool":
        raise TypeError(
            "Expected numbers to add over the replicas. Received: dtype=bool. Cast them first, "
            "with keras.ops.cast(x, 'int32')."
        )


def checked_axis(tensor: Any, axis: int) -> int:
    """Returns an axis, counted from 0.

    Args:
        tensor: A tensor.
        axis: One of its axes; negative values count from the end.

    Raises:
        ValueError: If the tensor has no such axis.
    """
    rank = len(tensor.shape)
    if not -rank <= axis < rank:
        raise ValueError(
            f"Expected axis to be one of the tensor's {rank}. Received: axis={axis}, "
            f"shape={tuple(tensor.shape)}. Give a scalar an axis first, with "
            "keras.ops.expand_dims(x, 0)."
        )
    return axis % rank
