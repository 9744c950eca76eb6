"""Makes variables equal on all workers, and computes checksums that show whether they are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import numpy as jnp

from kerasdist import keras_compat
from kerasdist.backends.base import checksums

if TYPE_CHECKING:
    from kerasdist.backends.jax.mesh.worker_placement import WorkerPlacement

# How many bytes of variables are on the host a second time, or the largest variable.
_BUNDLE = 1 << 26


def equalize(variables: Sequence[Any], place: WorkerPlacement) -> None:
    """Gives variables the chief's values, bit by bit. All workers must call it."""
    for bundle in _bundles(variables):
        arrays = [keras_compat.stored_value(one) for one in bundle]
        values = [np.asarray(array.addressable_data(0)) for array in arrays]
        own = np.concatenate(
            [np.ascontiguousarray(one).reshape(-1).view(np.uint8) for one in values]
        )
        chiefs = place.of_chief(own)
        begin = 0
        for variable, value in zip(bundle, values, strict=True):
            end = begin + value.nbytes
            if not np.array_equal(own[begin:end], chiefs[begin:end]):
                with place.variables():
                    new = jnp.array(chiefs[begin:end].view(value.dtype).reshape(value.shape))
                keras_compat.store_value(variable, new)
            begin = end


def _bundles(variables: Sequence[Any]) -> Iterator[list[Any]]:
    ends = itertools.accumulate(keras_compat.stored_value(one).nbytes for one in variables)
    pairs = zip(ends, variables, strict=True)
    for _, bundle in itertools.groupby(pairs, lambda pair: pair[0] // _BUNDLE):
        yield [variable for _, variable in bundle]


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
