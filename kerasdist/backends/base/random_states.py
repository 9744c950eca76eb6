"""The random generators that shuffle data and make seeds, of all libraries in this process.

They are Python's, NumPy's and Keras's, and PyTorch's where the script uses it: a ``DataLoader``
draws from PyTorch's on every backend.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from kerasdist import keras_compat
from kerasdist.backends import registry
from kerasdist.keras_compat import ops


def kept() -> dict[str, Any]:
    """Returns the states of the generators that shuffle data and make seeds, as JSON."""
    version, state, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    generator = keras_compat.global_seed_generator()
    torch = registry.torch_states()
    return {
        "python": [version, list(state), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": None if torch is None else torch.random_state(),
        "keras": None if generator is None else ops.convert_to_numpy(generator.state).tolist(),
    }


def put_back(states: Mapping[str, Any]) -> None:
    """Sets the generators to the states that `kept` has returned."""
    version, state, gauss = states["python"]
    random.setstate((version, tuple(state), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    torch = registry.torch_states()
    if torch is not None and states["torch"] is not None:
        torch.set_random_state(states["torch"])
    if states["keras"] is not None:
        generator = keras_compat.global_seed_generator() or keras.random.SeedGenerator(0)
        generator.state.assign(np.array(states["keras"]))
        keras_compat.set_global_seed_generator(generator)


def of_gpus() -> list[str]:
    """Returns the states of the GPUs' generators, one set per worker; only PyTorch has any."""
    torch = registry.torch_states()
    return [] if torch is None else torch.gpu_random_states()


def put_back_gpus(states: list[str]) -> None:
    """Sets the GPUs' generators to the states that `of_gpus` has returned."""
    torch = registry.torch_states()
    if torch is not None:
        torch.set_gpu_random_states(states)


def compared() -> dict[str, Any]:
    """Returns, by library, the state that must be equal on all workers to shuffle alike."""
    name, key, *rest = np.random.get_state()  # the generator that Keras draws from
    torch = registry.torch_states()
    return {
        "python": random.getstate(),
        "numpy": (name, np.asarray(key).tobytes(), *rest),
        "keras": keras_compat.global_seed(),
        **({} if torch is None else {"torch": torch.random_state()}),
    }


def seed(number: int) -> None:
    """Seeds all generators."""
    keras_compat.set_random_seed(number)
    torch = registry.torch_states()
    if torch is not None:
        torch.seed(number)
