"""Random draws: reproducible from the seed, different on each replica, whatever the timing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kerasdist import keras_compat
from kerasdist.core import context
from kerasdist.keras_compat import ops

# The distance between two replicas' seeds. It is large, so that a replica's seeds, which count up,
# do not reach the next replica's (torch's generator takes the sum of a seed's two parts): the
# 32-bit golden ratio, halved to stay a positive int32.
_STRIDE = 0x4F1BBCDC


def draw_seed(original: Callable[..., Any], generator: Any, *args: Any, **kwargs: Any) -> Any:
    """Draws the next seed; replica 0's are those of one device.

    Returns an integer tensor of shape ``(2,)``.
    """
    replica = context.replica()
    if replica is None:
        return original(generator, *args, **kwargs)
    with replica.collectives.equal_writes():  # every replica counts the generator's state up alike
        seed = original(generator, *args, **kwargs)
    index, dtype = replica.replica_id_in_sync_group, seed.dtype
    if not isinstance(index, int):  # on JAX the number is known only when the program runs
        offsets = [[_offset(one), 0] for one in range(replica.num_replicas_in_sync)]
        return seed + ops.convert_to_tensor(offsets, dtype=dtype)[index]
    return seed + ops.convert_to_tensor([_offset(index), 0], dtype=dtype) if index else seed


def _offset(index: int) -> int:
    return (index * _STRIDE) % 0x7FFFFFFF


def draw(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Draws random numbers; in a trial the replicas get the rows that one device has drawn."""
    trial = keras_compat.trial()
    if trial is None:
        return original(*args, **kwargs)
    given = args[0] if args else next(iter(kwargs.values()), None)
    return trial.draws.draw(original.__name__, lambda: original(*args, **kwargs), given)
