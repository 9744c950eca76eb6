"""Random numbers that differ between replicas and do not depend on the timing of replicas.

With `kerasdist.config.set_draws("global")`, each replica on TensorFlow and PyTorch draws random
numbers for all rows of the global batch, from a seed that is equal on all replicas, and uses only
the numbers of its own rows. These numbers are the ones that a single device draws for the rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from kerasdist import config, keras_compat
from kerasdist.core.context import current, replaced
from kerasdist.keras_compat import internals, ops

# The difference between the seeds of a replica and of the next replica: the 32-bit golden ratio,
# halved to fit int32. On PyTorch, Keras adds the two numbers of a seed, and one of these numbers
# counts up. With a small difference, a replica would soon use the same seeds as the next replica.
_STRIDE = 0x4F1BBCDC

# For each random function of Keras's backend: the argument that gives the number of rows.
_SIZED_BY = {
    "normal": "shape",
    "uniform": "shape",
    "truncated_normal": "shape",
    "randint": "shape",
    "dropout": "inputs",
    "categorical": "logits",
}


def draw_rows(original: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Draws what one device draws for the global batch, and returns the part for this replica."""
    replica, sized_by = current.fit_replica, _SIZED_BY.get(original.__name__)
    has_all_rows = replica is None or replica.num_replicas_in_sync == 1
    if has_all_rows or sized_by is None or current.draws_for_all or config.draws() != "global":
        return original(*args, **kwargs)
    call = inspect.signature(original).bind(*args, **kwargs)
    given: Any = call.arguments[sized_by]
    shape = tuple(given) if sized_by == "shape" else tuple(ops.shape(given))
    if not shape:
        with replaced(current, "draws_for_all", True):
            return original(*call.args, **call.kwargs)
    total, begin = _span(shape[0], replica)
    rest = shape[1:]
    if sized_by == "shape":
        call.arguments[sized_by] = (total, *rest)
    elif sized_by == "inputs":
        call.arguments[sized_by] = ops.ones((total, *rest), given.dtype)
        noise = call.arguments.get("noise_shape")
        if noise is not None and not _is_one_for_all(noise[0], shape[0]):
            call.arguments["noise_shape"] = (total, *noise[1:])
    else:
        around = (begin, total - begin - shape[0])
        before, after = (ops.zeros((count, *rest), given.dtype) for count in around)
        call.arguments[sized_by] = ops.concatenate([before, given, after])
    with replaced(current, "draws_for_all", True):
        drawn = original(*call.args, **call.kwargs)
    own = drawn[begin : begin + shape[0]]
    if not isinstance(begin, int):  # the slice has lost the static number of rows
        own = ops.reshape(own, (shape[0], *own.shape[1:]))
    return given * own if sized_by == "inputs" else own


def _span(count: Any, replica: Any) -> tuple[Any, Any]:
    """Returns how many entries to draw, and the index of this replica's first entry among them.

    An entry is an element along axis 0 of the drawn tensor. The replica needs `count` entries, and
    one device would draw the entries of all replicas. If `count` is not a multiple of the replica's
    rows, as for noise on weights, the entries do not belong to rows, and the function returns
    `count` and 0.
    """
    size, total = replica.local_batch.size, replica.local_batch.total
    if all(isinstance(one, int) for one in (count, size, total)):
        least, most, choose = min, max, _choose
    else:
        least, most, choose = ops.minimum, ops.maximum, ops.where
    size = most(size, 1)  # a replica without rows computes one stand-in row
    each, rest = total // replica.num_replicas_in_sync, total % replica.num_replicas_in_sync
    index = replica.replica_id_in_sync_group
    begin = least(index * each + least(index, rest), most(total - size, 0))
    has_rows = count % size == 0
    factor = count // size  # more than 1 if another axis is merged with the axis of rows
    return choose(has_rows, most(total, size) * factor, count), choose(has_rows, begin * factor, 0)


def _choose(condition: bool, one: int, other: int) -> int:
    return one if condition else other


def _is_one_for_all(noise: object, rows: object) -> bool:
    """Returns whether all rows of a batch share one draw of dropout.

    `noise` is the entry of dropout's `noise_shape` for the axis of the rows.
    """
    return isinstance(noise, int) and noise == 1 != rows


def draw_seed(
    original: Callable[..., Any], generator: object, *args: object, **kwargs: object
) -> Any:
    """Draws the next seed, which differs between replicas; replica 0 gets the seed of one device.

    Returns an integer tensor of shape ``(2,)``.
    """
    replica = current.replica
    if replica is None:
        return original(generator, *args, **kwargs)
    _require_places()
    with replica.collectives.equal_writes():  # every replica advances the generator's state equally
        seed = original(generator, *args, **kwargs)
    if current.draws_for_all:
        return seed
    index, dtype = replica.replica_id_in_sync_group, seed.dtype
    if not isinstance(index, int):  # on JAX the replica's number is a traced value
        offsets = [[_offset(one), 0] for one in range(replica.num_replicas_in_sync)]
        return seed + ops.convert_to_tensor(offsets, dtype=dtype)[index]
    return seed + ops.convert_to_tensor([_offset(index), 0], dtype=dtype) if index else seed


def require_draws(model: Any) -> None:
    """Refuses a model that draws random numbers, if Keras lacks what replicas need to draw them.

    To draw different numbers on each replica, kerasdist needs private parts of Keras. `draw_seed`
    checks this too, but Keras's dropout on PyTorch never calls `draw_seed`.
    """
    if keras_compat.backend_name() != "jax" and keras_compat.seed_states(model):
        internals.RANDOM.require()


@cache
def _require_places() -> None:
    if keras_compat.backend_name() != "jax":  # on JAX, draws need no private part of Keras
        internals.RANDOM.require()
        internals.SEED_GENERATOR.require()


def _offset(index: int) -> int:
    return (index * _STRIDE) % 0x7FFFFFFF
