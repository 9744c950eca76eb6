"""The settings of Keras that layers and operations depend on, and where random draws begin."""

from __future__ import annotations

import random
import sys
from typing import Any

import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import SeedGenerator
from keras.src.utils.rng_utils import GLOBAL_RANDOM_SEED

_threads_own = global_state.GLOBAL_STATE_TRACKER
_floatx = keras.config.floatx


def settings() -> tuple[str, str, bool]:
    """Returns the settings that a compiled function depends on beside its arguments and variables.

    Every step calls it, so it is fast.
    """
    own = _threads_own
    policy = getattr(own, "dtype_policy", None) or keras.config.dtype_policy()
    return policy.name, _floatx(), getattr(own, "stateless_scope", None) is not None


_GLOBAL_SEED_GENERATOR = "global_seed_generator"


def is_seeded(seed: object) -> bool:
    """Returns whether the user has seeded a draw; else torch's own generator is used."""
    return seed is not None and not (isinstance(seed, SeedGenerator) and seed._initial_seed is None)


def global_seed_generator() -> Any:
    """Returns the generator that unseeded draws of this thread take their seeds from, or None."""
    return global_state.get_global_attribute(_GLOBAL_SEED_GENERATOR)


def set_global_seed_generator(generator: object) -> None:
    """Sets the generator that unseeded draws of this thread take their seeds from."""
    global_state.set_global_attribute(_GLOBAL_SEED_GENERATOR, generator)


def global_seed() -> int | None:
    """Returns what ``keras.utils.set_random_seed`` was called with last, None if it was not."""
    return global_state.get_global_attribute(GLOBAL_RANDOM_SEED)


def set_random_seed(number: int) -> None:
    """Does what `keras.utils.set_random_seed` does, which imports TensorFlow to seed it.

    That would cost each worker on other frameworks 420 MB.
    """
    if "tensorflow" in sys.modules:
        keras.utils.set_random_seed(number)
        return
    global_state.set_global_attribute(GLOBAL_RANDOM_SEED, number)
    set_global_seed_generator(None)
    random.seed(number)
    np.random.seed(number)
