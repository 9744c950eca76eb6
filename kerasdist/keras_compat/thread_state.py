"""Keras's state of each thread: scopes, settings of operations, and seeds of random numbers."""

from __future__ import annotations

import random
import sys
from functools import partial
from typing import Any

import keras
import numpy as np

from kerasdist.core.internals import Internal
from kerasdist.keras_compat import internals
from kerasdist.keras_compat.internals import SEED_GENERATOR

# The entry "scope" is the result of `name_of_scope`. Compiled steps read this entry. They do not
# call the function with `functools.cache`, because torch's compiler would trace its body.
KNOWN: dict[str, str | None] = {}


# `keras.utils.clear_session` replaces the object in which Keras keeps the state of each thread. So
# each of the following functions reads this object anew, from Keras's module.


def of_thread(internal: Internal) -> Any:
    """Returns an entry of the calling thread's Keras state, None if the entry is not set."""
    return getattr(getattr(*internals.THREAD_STATE.place), internal.value, None)


def keep_of_thread(internal: Internal, value: object) -> None:
    """Sets an entry of the calling thread's Keras state."""
    setattr(getattr(*internals.THREAD_STATE.place), internal.value, value)


def copy_thread_state() -> dict[str, Any]:
    """Returns Keras's state of the calling thread: scopes, policies, the device."""
    return dict(vars(getattr(*internals.THREAD_STATE.place)))


def paste_thread_state(state: dict[str, Any]) -> None:
    """Sets Keras's state of the calling thread to the state of another thread."""
    here = vars(getattr(*internals.THREAD_STATE.place))
    here.clear()
    # Stacks, such as the stack of name scopes, are copied for each thread.
    for key, value in state.items():
        here[key] = list(value) if isinstance(value, list) else value


def name_of_scope() -> str | None:
    """Returns the name of the entry in which Keras keeps the open stateless scope.

    Returns None if this version of Keras keeps the scope elsewhere.
    """
    if "scope" not in KNOWN:
        KNOWN["scope"] = None
        if internals.THREAD_STATE.is_there():
            entries = vars(getattr(*internals.THREAD_STATE.place))
            with keras.StatelessScope(initialize_variables=False) as scope:
                names = (name for name, one in entries.items() if one is scope)
                KNOWN["scope"] = next(names, None)
    return KNOWN["scope"]


def get_stateless_scope() -> Any:
    """Returns the `keras.StatelessScope` that is open in this thread, None if there is none."""
    name = KNOWN["scope"] if "scope" in KNOWN else name_of_scope()
    if name is not None:
        return getattr(getattr(*internals.THREAD_STATE.place), name, None)
    with keras.StatelessScope(initialize_variables=False) as scope:
        return scope.original_scope


def is_in_layer() -> bool:
    """Returns whether this thread is inside of the call of a layer or a model."""
    return of_thread(internals.CALL_CONTEXT) is not None


def maker_of_variable() -> Any:
    """Returns the layer or optimizer that is making variables in this thread, or None."""
    scopes = of_thread(internals.NAME_SCOPES)
    return scopes[-1].caller if scopes else None


def path_of_call() -> str:
    """Returns the path of the layer that this thread is calling, with the layers around it."""
    return "/".join(scope.name for scope in of_thread(internals.NAME_SCOPES) or ())


def is_of_optimizer() -> bool:
    """Returns whether a variable that this thread is making belongs to an optimizer."""
    return isinstance(maker_of_variable(), keras.Optimizer)


def is_symbolic() -> bool:
    """Returns whether this thread computes only shapes, as Keras does on PyTorch's meta device."""
    return of_thread(internals.TORCH_DEVICE) == "meta"


_policy, _floatx = keras.config.dtype_policy, keras.config.floatx


def settings() -> tuple[str, str, bool]:
    """Returns the settings of this thread on which a compiled function depends.

    A compiled function also depends on its arguments and on variables, which are not included.
    Every step calls this function, so it must be fast.
    """
    return _policy().name, _floatx(), get_stateless_scope() is not None


def is_seeded(seed: object) -> bool:
    """Returns whether the argument `seed` of a random operation contains a seed from the user.

    On PyTorch, operations without such a seed use torch's own random generator.
    """
    if isinstance(seed, keras.random.SeedGenerator):
        return seed.get_config()["seed"] is not None
    return seed is not None


def has_no_seed_generator() -> bool:
    """Returns whether this thread's next draw without a seed will make a generator of seeds.

    Keras makes one generator per thread. Returns False if this version of Keras has no such
    generators; `draw_seed` then refuses draws in replicas.
    """
    return SEED_GENERATOR.path is not None and of_thread(SEED_GENERATOR) is None


# These two functions get and set this thread's generator of seeds for draws without a seed.
global_seed_generator = partial(of_thread, SEED_GENERATOR)
set_global_seed_generator = partial(keep_of_thread, SEED_GENERATOR)


def global_seed() -> int | None:
    """Returns the seed that ``keras.utils.set_random_seed`` last got, None if it was not called."""
    return of_thread(internals.RANDOM_SEED)


def set_random_seed(number: int) -> None:
    """Does the same as `keras.utils.set_random_seed`, without importing TensorFlow.

    Importing TensorFlow would cost each worker on other frameworks 420 MB of memory.
    """
    if "tensorflow" in sys.modules:
        keras.utils.set_random_seed(number)
        return
    keep_of_thread(internals.RANDOM_SEED, number)
    set_global_seed_generator(None)
    random.seed(number)
    np.random.seed(number)
