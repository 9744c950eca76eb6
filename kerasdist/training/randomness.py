"""Random draws: different on each replica, alike on all workers, whatever the timing.

With `kerasdist.config.set_draws("global")` each replica of TensorFlow and PyTorch draws for the
whole batch, from one seed, and takes its own rows: they are the numbers that one device draws.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from typing import Any

from kerasdist import config, keras_compat
from kerasdist.core.context import current
from kerasdist.keras_compat import internals, ops

# The distance between two replicas' seeds. It is large, so that a replica's seeds, which count up,
# do not reach the next replica's (torch's generator takes the sum of a seed's two parts): the
# 32-bit golden ratio, halved to stay a positive int32.
_STRIDE = 0x4F1BBCDC

# By the name of a function of Keras's backend, the argument from which its draws have their rows.
_SIZED_BY = {
    "normal": "shape",
    "uniform": "shape",
    "truncated_normal": "shape",
    "randint": "shape",
    "dropout": "inputs",
    "categorical": "logits",
}
_draws_for_all = ContextVar("draws for all replicas", default=False)


def draw_rows(original: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Draws what one device draws for the global batch, and returns this replica's rows of it."""
    replica, sized_by = current.replica, _SIZED_BY.get(original.__name__)
    if sized_by is None or not _wants_rows(replica) or _draws_for_all.get():
        return original(*args, **kwargs)
    call = inspect.signature(original).bind(*args, **kwargs)
    given: Any = call.arguments[sized_by]
    shape = tuple(given) if sized_by == "shape" else tuple(ops.shape(given))
    if not shape:
        return _drawn_for_all(original, call)
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
    drawn = _drawn_for_all(original, call)
    own = drawn[begin : begin + shape[0]]
    if not isinstance(begin, int):  # a graph has lost the static size
        own = ops.reshape(own, (shape[0], *own.shape[1:]))
    return given * own if sized_by == "inputs" else own


def _wants_rows(replica: Any) -> bool:
    """Returns whether a replica divides a global batch with others, and shall draw its rows."""
    if replica is None or replica.local_batch is None or replica.num_replicas_in_sync == 1:
        return False
    return config.draws() == "global"


def _drawn_for_all(original: Callable[..., Any], call: inspect.BoundArguments) -> Any:
    token = _draws_for_all.set(True)
    try:
        return original(*call.args, **call.kwargs)
    finally:
        _draws_for_all.reset(token)


def _span(count: Any, replica: Any) -> tuple[Any, Any]:
    """Returns how many entries one device has where a replica has `count`, and how many before.

    What is no multiple of the replica's rows, such as noise for weights, is the same on all.
    """
    size, total = replica.local_batch.size, replica.local_batch.total
    if all(isinstance(one, int) for one in (count, size, total)):
        least, most, choose = min, max, _choose
    else:
        least, most, choose = ops.minimum, ops.maximum, ops.where
    size = most(size, 1)  # a replica without rows has a stand-in
    each, rest = total // replica.num_replicas_in_sync, total % replica.num_replicas_in_sync
    index = replica.replica_id_in_sync_group
    begin = least(index * each + least(index, rest), most(total - size, 0))
    has_rows = count % size == 0
    factor = count // size  # of entries for each row, where an axis is merged with that of rows
    return choose(has_rows, most(total, size) * factor, count), choose(has_rows, begin * factor, 0)


def _choose(condition: bool, one: int, other: int) -> int:
    return one if condition else other


def _is_one_for_all(noise: object, rows: object) -> bool:
    """Returns whether all rows of a batch share one draw of dropout."""
    return isinstance(noise, int) and noise == 1 != rows


def draw_seed(
    original: Callable[..., Any], generator: object, *args: object, **kwargs: object
) -> Any:
    """Draws the next seed; replica 0's are those of one device.

    Returns an integer tensor of shape ``(2,)``.
    """
    replica = current.replica
    if replica is None:
        return original(generator, *args, **kwargs)
    _require_places()
    with replica.collectives.equal_writes():  # every replica counts the generator's state up alike
        seed = original(generator, *args, **kwargs)
    if _draws_for_all.get():
        return seed
    index, dtype = replica.replica_id_in_sync_group, seed.dtype
    if not isinstance(index, int):  # on JAX the number is known only when the program runs
        offsets = [[_offset(one), 0] for one in range(replica.num_replicas_in_sync)]
        return seed + ops.convert_to_tensor(offsets, dtype=dtype)[index]
    return seed + ops.convert_to_tensor([_offset(index), 0], dtype=dtype) if index else seed


def require_draws(model: Any) -> None:
    """Refuses a model that draws, where replicas could not draw their own numbers.

    Dropout on PyTorch takes no seed, so that no draw would come to `draw_seed`.
    """
    if keras_compat.backend_name() != "jax" and keras_compat.seed_states(model):
        internals.RANDOM.require()


@cache
def _require_places() -> None:
    if keras_compat.backend_name() != "jax":  # where no further place decides what is drawn
        internals.RANDOM.require()
        internals.SEED_GENERATOR.require()


def _offset(index: int) -> int:
    return (index * _STRIDE) % 0x7FFFFFFF
