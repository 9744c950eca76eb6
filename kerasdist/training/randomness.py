"""Random draws: different on each replica, alike on all workers, whatever the timing."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from functools import cache
from typing import Any

from kerasdist.backends.base import random_states
from kerasdist.core import context
from kerasdist.core.user_warnings import warn_user
from kerasdist.job.comparison import named_workers
from kerasdist.job.job import Job
from kerasdist.keras_compat import ops

# The distance between two replicas' seeds. It is large, so that a replica's seeds, which count up,
# do not reach the next replica's (torch's generator takes the sum of a seed's two parts): the
# 32-bit golden ratio, halved to stay a positive int32.
_STRIDE = 0x4F1BBCDC


def draw_seed(
    original: Callable[..., Any], generator: object, *args: object, **kwargs: object
) -> Any:
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
