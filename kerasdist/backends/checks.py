"""Checks that all backends make of what a caller gives them."""

from __future__ import annotations

from typing import Any


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
