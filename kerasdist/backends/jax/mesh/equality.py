"""Makes variables equal on all workers, and computes checksums that show whether they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from kerasdist import keras_compat
from kerasdist.backends.base import checksums
from kerasdist.backends.jax.mesh.layout import AXIS

if TYPE_CHECKING:
    from kerasdist.backends.jax.mesh.placement import MeshPlacement

# The most bytes that one collective sends; a large model needs several.
_BUNDLE_BYTES = 1 << 26


def equalize(variables: Sequence[Any], place: MeshPlacement) -> None:
    """Gives variables the chief's values, bit by bit. All workers must call it."""
    values = [np.asarray(keras_compat.stored_value(variable)) for variable in variables]
    own = np.concatenate([_bytes(value) for value in values])
    bundles = range(0, own.size, _BUNDLE_BYTES)
    chiefs = [_of_chief(own[begin : begin + _BUNDLE_BYTES], place) for begin in bundles]
    told = np.concatenate([own[:0], *chiefs])
    begin = 0
    for variable, value in zip(variables, values, strict=True):
        end = begin + value.nbytes
        if not np.array_equal(own[begin:end], told[begin:end]):
            with place.variables():
                new = jnp.array(told[begin:end].view(value.dtype).reshape(value.shape))
            keras_compat.store_value(variable, new)
        begin = end


def checksums_of(values: Sequence[Any]) -> list[int]:
    """Returns a checksum of each array's bits in this process."""
    own = [value.addressable_data(0) for value in values]
    if all(value.platform() == "cpu" for value in own):
        return [checksums.of_array(value) for value in own]  # no copy, and nothing to compile
    return [int(one) for one in jax.device_get([_sum_of_bits(value) for value in own])]


@jax.jit
def _sum_of_bits(value: Any) -> Any:
    kind = jnp.uint8 if value.dtype.itemsize == 1 else jnp.uint16
    whole = value.astype(jnp.uint8) if value.dtype == bool else value
    bits = jax.lax.bitcast_convert_type(whole, kind).astype(jnp.uint32)
    # A random factor for each position, so that exchanged elements change the sum.
    factors = (jnp.arange(bits.size, dtype=jnp.uint32) + 1) * jnp.uint32(0x9E3779B1)
    factors = (factors ^ (factors >> 15)) * jnp.uint32(0x85EBCA77) | 1
    return jnp.sum(bits * factors.reshape(bits.shape), dtype=jnp.uint32)


def _bytes(value: Any) -> Any:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def _of_chief(data: Any, place: MeshPlacement) -> Any:
    """Returns the chief's bytes, on all workers; the other workers' own bytes are ignored."""
    brought = place.to_program(place.to_rest([jnp.asarray(data)], [None]), [None])

    def told(data: Any) -> Any:
        return jax.lax.psum(jnp.where(jax.lax.axis_index(AXIS) == 0, data, 0), AXIS)

    whole = PartitionSpec()
    tell = jax.shard_map(told, mesh=place.mesh, in_specs=whole, out_specs=whole, check_vma=False)
    [chiefs] = place.from_program([jax.jit(tell)(*brought)])
    return np.asarray(chiefs)
