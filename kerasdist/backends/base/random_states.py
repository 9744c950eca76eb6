"""The states of this process's random generators that shuffle data and make seeds.

The generators are those of Python, NumPy and Keras, and PyTorch's if the script imports PyTorch.
PyTorch's generator is included on every backend, because a ``DataLoader`` shuffles data with it.
This module does not import PyTorch, but looks for it among the modules that are already imported.
"""

from __future__ import annotations

import random
import secrets
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import keras
import numpy as np

from kerasdist import keras_compat
from kerasdist.core.user_warnings import warn_user
from kerasdist.job.comparison import digest, named_workers
from kerasdist.job.job import Job
from kerasdist.keras_compat import ops


def kept() -> dict[str, Any]:
    """Returns the states of the generators that shuffle data and make seeds.

    The result has only types that JSON can express.
    """
    version, state, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    generator = keras_compat.global_seed_generator()
    torch = _torch()
    return {
        "python": [version, list(state), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": None if torch is None else text_of(torch.get_rng_state()),
        "keras": None if generator is None else ops.convert_to_numpy(generator.state).tolist(),
    }


def put_back(states: Mapping[str, Any]) -> None:
    """Sets the generators to states that `kept` has returned."""
    version, state, gauss = states["python"]
    random.setstate((version, tuple(state), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    torch = _torch()
    if torch is not None and states["torch"] is not None:
        torch.set_rng_state(state_of(states["torch"]))
    if states["keras"] is not None:
        generator = keras_compat.global_seed_generator() or keras.random.SeedGenerator(0)
        generator.state.assign(np.array(states["keras"]))
        keras_compat.set_global_seed_generator(generator)


def of_gpus() -> list[str]:
    """Returns the states of the GPUs' generators, which only PyTorch has.

    The list is empty if this process has not yet used PyTorch on a GPU.
    """
    torch = _torch()
    if torch is None or not torch.cuda.is_initialized():
        return []
    return list(map(text_of, torch.cuda.get_rng_state_all()))


def put_back_gpus(states: list[str]) -> None:
    """Sets the GPUs' generators to states that `of_gpus` has returned."""
    torch = _torch()
    if torch is not None and states:
        torch.cuda.set_rng_state_all(list(map(state_of, states)))


def _torch() -> Any:
    """Returns PyTorch's module; None if the script has not imported it."""
    return sys.modules.get("torch")


def text_of(state: Any) -> str:
    """Converts the state of a PyTorch generator, a tensor of bytes, to hexadecimal digits."""
    return state.numpy().tobytes().hex()


def state_of(text: str) -> Any:
    """Converts hexadecimal digits, as `text_of` makes them, to the state of a generator."""
    return _torch().frombuffer(bytearray.fromhex(text), dtype=_torch().uint8)


def compared() -> dict[str, Any]:
    """Returns the random states that must be equal on all workers; the keys name the libraries."""
    states = {**kept(), "keras": keras_compat.global_seed()}
    if states["torch"] is None:
        del states["torch"]
    return states


def seed(number: int) -> None:
    """Seeds all generators."""
    keras_compat.set_random_seed(number)
    torch = _torch()
    if torch is not None:
        torch.manual_seed(number)


def ensure_equal(job: Job, *, begins: bool = False) -> None:
    """Gives all workers the chief's random states if the states differ.

    All workers must call this function. It warns once if states differ. At the beginning of a job
    (`begins`) it warns only if the chief has a seed and another worker has a different seed or
    none. If no worker has a seed, the states always differ at the beginning, so a warning would be
    useless.
    """
    own = {library: digest(state) for library, state in compared().items()}
    found = job.choose("random state", own, _states_for_all)
    if found is None:
        return
    apart, differing, given, drawn, states = found
    is_concerned = job.is_chief or job.rank in differing
    if is_concerned and (not begins or (given is not None and "keras" in apart)):
        _warn_once(job.who, ", ".join(apart), named_workers(differing))
    if given is None or "keras" in apart:  # also seeds TensorFlow, whose state cannot be sent
        seed(drawn if given is None else given)
    put_back(states)


def _states_for_all(everyone: list[dict[str, str]]) -> list[Any] | None:
    """Returns the libraries whose states differ, the workers that differ, and the chief's states.

    Before the chief's states, the list has the chief's seed, and a new seed for the case that the
    chief has none. Returns None if no states differ.
    """
    # Only libraries that all workers have imported are compared. A library that only some workers
    # have imported does not shuffle data that all workers read.
    common = set(everyone[0]).intersection(*everyone)
    apart = sorted(one for one in common if len({theirs[one] for theirs in everyone}) > 1)
    if not apart:
        return None
    differing = [rank for rank, theirs in enumerate(everyone) if _differs(theirs, everyone[0])]
    given, drawn = compared()["keras"], secrets.randbits(31)
    return [apart, differing, given, drawn, kept()]


def _differs(theirs: dict[str, Any], chiefs: dict[str, Any]) -> bool:
    return any(theirs[library] != chiefs[library] for library in theirs.keys() & chiefs.keys())


@cache
def _warn_once(who: str, libraries: str, ranks: str) -> None:
    warn_user(
        f"{who} Expected all workers to be seeded alike, and to draw equally many random numbers. "
        f"Received: other states of {libraries} on {ranks} than on worker 0. All workers continue "
        "with the states of worker 0, so that they shuffle data in the same order. Call "
        "keras.utils.set_random_seed with the same number on all workers; where one worker draws "
        "alone, give it a generator of its own (numpy.random.default_rng)."
    )
