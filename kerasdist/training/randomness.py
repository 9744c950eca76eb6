"""Random draws: different on each replica, alike on all workers, whatever the timing.

With `kerasdist.config.set_draws("global")` each replica of TensorFlow and PyTorch draws for the
whole batch, from one seed, and takes its own rows: they are the numbers that one device draws.
"""

from __future__ import annotations

import hashlib
import inspect
import secrets
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from typing import Any

from kerasdist import config
from kerasdist.backends.base import random_states
from kerasdist.core.context import current
from kerasdist.core.user_warnings import warn_user
from kerasdist.job.comparison import named_workers
from kerasdist.job.job import Job
from kerasdist.keras_compat import ops

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
    with replica.collectives.equal_writes():  # every replica counts the generator's state up alike
        seed = original(generator, *args, **kwargs)
    if _draws_for_all.get():
        return seed
    index, dtype = replica.replica_id_in_sync_group, seed.dtype
    if not isinstance(index, int):  # on JAX the number is known only when the program runs
        offsets = [[_offset(one), 0] for one in range(replica.num_replicas_in_sync)]
        return seed + ops.convert_to_tensor(offsets, dtype=dtype)[index]
    return seed + ops.convert_to_tensor([_offset(index), 0], dtype=dtype) if index else seed


def _offset(index: int) -> int:
    return (index * _STRIDE) % 0x7FFFFFFF


def ensure_equal(job: Job, *, begins: bool = False) -> None:
    """Gives all workers the chief's random states, if theirs differ. All workers must call it.

    It warns once, but not of workers that `begins` finds unseeded: their states always differ.
    """
    own = {library: _digest(state) for library, state in random_states.compared().items()}
    found = job.choose("random state", own, _states_for_all)
    if found is None:
        return
    apart, differing, seed, drawn, states = found
    is_concerned = job.is_chief or job.rank in differing
    if is_concerned and (not begins or (seed is not None and "keras" in apart)):
        _warn_once(job.rank, job.num_workers, ", ".join(apart), named_workers(differing))
    if seed is None or "keras" in apart:  # TensorFlow's state cannot be sent
        random_states.seed(drawn if seed is None else seed)
    random_states.put_back(states)


def _states_for_all(everyone: list[dict[str, str]]) -> list[Any] | None:
    """Returns what differs, on which workers, and the chief's states; None if nothing differs."""
    # A library that is not imported on all workers does not shuffle what they all read.
    common = set(everyone[0]).intersection(*everyone)
    apart = sorted(one for one in common if len({theirs[one] for theirs in everyone}) > 1)
    if not apart:
        return None
    differing = [rank for rank, theirs in enumerate(everyone) if _differs(theirs, everyone[0])]
    seed, drawn = random_states.compared()["keras"], secrets.randbits(31)
    return [apart, differing, seed, drawn, random_states.kept()]


@cache
def _warn_once(rank: int, workers: int, libraries: str, ranks: str) -> None:
    warn_user(
        f"[worker {rank}/{workers}] Expected all workers to be seeded alike, and to draw as many "
        f"random numbers. Received: other states of {libraries} on {ranks} than on worker "
        "0. All go on with those of worker 0, so that they shuffle data in the same order. Call "
        "keras.utils.set_random_seed with the same number on all workers; what one worker draws "
        "alone, it should draw from a generator of its own (numpy.random.default_rng)."
    )


def _differs(theirs: dict[str, Any], chiefs: dict[str, Any]) -> bool:
    return any(theirs[library] != chiefs[library] for library in theirs.keys() & chiefs.keys())


def _digest(state: object) -> str:
    return hashlib.sha256(repr(state).encode()).hexdigest()[:16]
