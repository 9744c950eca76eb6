"""Mean and variance of a batch that is sharded over replicas, for BatchNormalization in `fit`.

`fit` is one program over the global batch. XLA would compute Keras's mean and Keras's variance by
an all-reduce each, and their gradient by two more. Here each replica computes the mean and the
squared deviations of its own rows. One all-gather collects these results, and every device
combines them as `kerasdist.training.batch_norm` does. With many replicas XLA uses two all-reduces
instead. The derivative is written by hand. The backward pass communicates only for the gradients of
Keras's scale and offset, which are two sums that XLA joins into one all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import keras
from jax import numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from kerasdist import keras_compat
from kerasdist.backends.jax.mesh.layout import Layout, layout_of_step
from kerasdist.training import batch_norm
from kerasdist.training.batch_norm import added_to_count, combined


@cache
def install() -> None:
    """Hooks into the function by which Keras computes the moments of a batch, once per process."""
    keras_compat.install(moments_of_mesh=_batch_moments)


def _batch_moments(
    original: Callable[..., Any], layer: keras.Layer, inputs: jax.Array, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    layout, axes = layout_of_step(), batch_norm.reduced_axes(layer, inputs)
    # A batch with fewer rows than replicas is not divided.
    if layout is None or 0 not in axes or not 1 < layout.replicas <= inputs.shape[0]:
        return original(layer, inputs, mask)
    return moments(layout, inputs, axes, mask)


def moments(
    layout: Layout, inputs: jax.Array, axes: Sequence[int], mask: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance per channel of a batch that is sharded over a layout's replicas.

    Args:
        layout: The mesh.
        inputs: Floating-point values. Axis 0 is sharded over the replicas, and has at least one row
            for each replica.
        axes: The axes to reduce, 0 among them.
        mask: Which values count, in the shape of the inputs without the last axis; None if all
            values count.
    """
    axes = tuple(axes)
    weights = None
    if mask is not None:
        weights = jnp.broadcast_to(mask.astype(inputs.dtype)[..., None], inputs.shape)
        weights = jax.lax.stop_gradient(weights)
    mean, variance = _global_moments(layout, axes, added_to_count(mask), inputs, weights)
    return jnp.squeeze(mean, axes), jnp.squeeze(variance, axes)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _global_moments(
    layout: Layout,
    axes: tuple[int, ...],
    epsilon: float,
    inputs: jax.Array,
    weights: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the mean and the variance; both keep the reduced axes, with size 1."""
    return combined(*_gathered(layout, inputs, weights, axes), added=epsilon)


@_global_moments.defjvp
def _change_of_moments(
    layout: Layout, axes: tuple[int, ...], epsilon: float, primals: Any, tangents: Any
) -> tuple[Any, Any]:
    inputs, weights = primals
    change = tangents[0]
    mean, variance = _global_moments(layout, axes, epsilon, inputs, weights)
    deviation = inputs - mean
    if weights is None:
        count = inputs.size // mean.size
    else:
        count = weights.sum(axes, keepdims=True)
        change, deviation = weights * change, weights * deviation
    divisor = count + epsilon
    mean_change = change.sum(axes, keepdims=True) / divisor
    product = 2 * deviation * tangents[0]
    # With a mask, the weighted deviations do not sum to 0 but to epsilon times the mean, which adds
    # a term to the derivative. Without a mask epsilon is 0.
    variance_change = product.sum(axes, keepdims=True) / divisor
    if epsilon:
        variance_change -= 2 * epsilon * mean * mean_change / divisor
    return (mean, variance), (mean_change, variance_change)


def _gathered(
    layout: Layout, inputs: jax.Array, weights: jax.Array | None, axes: tuple[int, ...]
) -> list[jax.Array]:
    """Returns counts, means and sums of squared deviations, one row per replica."""
    replicas, rows = layout.replicas, inputs.shape[0]
    each = -(-rows // replicas)
    if rows % replicas and weights is None:
        # The last replicas get padding rows. `_by_replica` gives these rows the weight 0, so the
        # real rows need weights, too.
        shape = (rows, *[1] * (inputs.ndim - 1))
        weights = jnp.ones(shape, inputs.dtype)
    local_batches = _by_replica(layout, inputs, each)
    inner = tuple(axis + 1 for axis in axes)
    if weights is None:
        mean = local_batches.mean(inner, keepdims=True)
        count = local_batches.size // mean.size
        squares = jnp.square(local_batches - mean).sum(inner, keepdims=True)
        means, squares = _everywhere(layout, mean, squares)
        return [jnp.full((replicas, *[1] * inputs.ndim), count, inputs.dtype), means, squares]
    weights = jnp.broadcast_to(_by_replica(layout, weights, each), local_batches.shape)
    count = weights.sum(inner, keepdims=True)
    mean = (weights * local_batches).sum(inner, keepdims=True) / jnp.where(count > 0, count, 1)
    squares = (weights * jnp.square(local_batches - mean)).sum(inner, keepdims=True)
    return _everywhere(layout, count, mean, squares)


def _by_replica(layout: Layout, array: jax.Array, each: int) -> jax.Array:
    """Returns the replicas' local batches of an array along a new first axis, padded with zeros."""
    missing = each * layout.replicas - array.shape[0]
    if missing:
        array = jnp.pad(array, [(0, missing), *[(0, 0)] * (array.ndim - 1)])
    local_batches = array.reshape(layout.replicas, each, *array.shape[1:])
    return _sharded(layout, local_batches, layout.by_replica)


def _everywhere(layout: Layout, *parts: jax.Array) -> list[jax.Array]:
    """Gathers arrays that have one row per replica, so that each device has the rows of all.

    With more than `MOST_GATHERED` replicas, returns the arrays without gathering them. XLA then
    inserts all-reduces where the calling code combines the rows.
    """
    if layout.replicas > batch_norm.MOST_GATHERED:
        return list(parts)
    together = _sharded(layout, _sharded(layout, jnp.stack(parts, 1), layout.by_replica), None)
    return list(jnp.unstack(together, axis=1))


def _sharded(layout: Layout, array: jax.Array, first: str | tuple[str, ...] | None) -> jax.Array:
    # XLA may shard the other axes over a replica's logical devices in any way.
    free = None if layout.splits.logical_devices == 1 else PartitionSpec.UNCONSTRAINED
    spec = PartitionSpec(first, *[free] * (array.ndim - 1))
    return jax.lax.with_sharding_constraint(array, NamedSharding(layout.shard_mesh, spec))
