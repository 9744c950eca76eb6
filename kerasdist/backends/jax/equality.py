"""Equal values on all workers: the chief's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from kerasdist import keras_seam
from kerasdist.backends.jax.layout import AXIS
from kerasdist.backends.jax.placement import MeshPlacement

# What one collective carries; a large model needs several.
_BUNDLE_BYTES = 1 << 26


def equalize(variables: Sequence[Any], place: MeshPlacement) -> None:
    """Gives variables the chief's values, bit by bit. All workers must call it.

    Args:
        variables: Keras variables that have values, the same on all workers.
        place: The devices of all workers.
    """
    values = [np.asarray(keras_seam.stored_value(variable)) for variable in variables]
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
            keras_seam.store_value(variable, new)
        begin = end


def _bytes(value: Any) -> Any:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def _of_chief(data: Any, place: MeshPlacement) -> Any:
    """Returns the chief's bytes; of the others what they bring is not looked at."""
    brought = place.entered(place.settled([jnp.asarray(data)], [None]), [None])

    def told(data: Any) -> Any:
        return jax.lax.psum(jnp.where(jax.lax.axis_index(AXIS) == 0, data, 0), AXIS)

    whole = PartitionSpec()
    tell = jax.shard_map(told, mesh=place.mesh, in_specs=whole, out_specs=whole, check_vma=False)
    [chiefs] = place.at_rest([jax.jit(tell)(*brought)])
    return np.asarray(chiefs)
