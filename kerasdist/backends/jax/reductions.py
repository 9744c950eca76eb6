"""What becomes of the components of a distributed value."""

from __future__ import annotations

from typing import Any

import jax
from jax import numpy as jnp

from kerasdist.backends.checks import check_shapes
from kerasdist.backends.jax.components import divided
from kerasdist.backends.jax.exchange import check_is_number
from kerasdist.backends.jax.layout import AXIS
from kerasdist.backends.jax.sources import Equal, Own, Padded, Source
from kerasdist.collectives import ReduceOp


def reduced(source: Source, op: ReduceOp, axis: int | None) -> Any:
    """Returns the sum or mean of components.

    Args:
        source: The components.
        op: The operation.
        axis: None, or an axis along which they are reduced too.
    """
    check_is_number(source.array)
    mean = op is ReduceOp.MEAN
    count = source.replicas
    if isinstance(source, Own):
        local = source.array if axis is None else source.array.sum(axis)
        total = jax.lax.psum(local, AXIS)
    elif isinstance(source, Equal):
        total = source.array if axis is None else source.array.sum(axis, dtype=source.array.dtype)
        if mean and axis is None:
            return total
        total = total * count
    elif isinstance(source, Padded) and axis is not None:
        # What was padded is zero, and what differs along other axes does not fit.
        sums = [part.sum(axis, dtype=part.dtype) for part in source]
        if len({one.shape for one in sums}) > 1:
            source.stacked()
        total = sum(sums[1:], sums[0])
        return divided(total, sum(shape[axis] for shape in source.layout)) if mean else total
    else:
        stack = source.stacked()
        total = stack.sum(0, dtype=stack.dtype)
        total = total if axis is None else total.sum(axis, dtype=stack.dtype)
    if axis is not None:
        count *= source.shape[axis]
    return divided(total, count) if mean else total


def gathered(source: Source, axis: int) -> Any:
    """Returns components one after another.

    Args:
        source: The components.
        axis: The axis to join them along.
    """
    if isinstance(source, Own):
        return jax.lax.all_gather(source.array, AXIS, axis=axis, tiled=True)
    if isinstance(source, Padded):
        check_shapes(source.layout, axis)
        return jnp.concatenate(list(source), axis)
    stack = source.stacked()
    return jnp.concatenate([stack[index] for index in range(source.replicas)], axis)
