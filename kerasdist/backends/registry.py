"""Selects the backend for the framework that Keras runs on, and imports only that backend."""

from __future__ import annotations

import importlib
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache

from kerasdist import keras_compat
from kerasdist.api.values import Mirrored, PerReplica
from kerasdist.backends.base.interface import Backend
from kerasdist.errors import UnsupportedError

_MODULES = {
    "tensorflow": "kerasdist.backends.tensorflow.backend",
    "jax": "kerasdist.backends.jax.backend",
    "torch": "kerasdist.backends.torch.backend",
}


_in_place: list[Backend] = []


def current() -> Backend:
    """Returns the backend that `used` has set, else that of the framework that Keras runs on."""
    return _in_place[-1] if _in_place else _of_keras()


@contextmanager
def used(backend: Backend) -> Generator[None]:
    """Makes `current` return the given backend until the block ends."""
    _in_place.append(backend)
    try:
        yield
    finally:
        _in_place.pop()


@cache
def _of_keras() -> Backend:
    name = keras_compat.backend_name()
    if name not in _MODULES:
        raise UnsupportedError(
            f"Expected Keras to run on one of {sorted(_MODULES)}. Received: backend={name!r}. Set "
            "the variable KERAS_BACKEND before Keras is imported."
        )
    # Keras must know these classes before a program passes an object of one of them to Keras.
    for kind in (PerReplica, Mirrored):
        keras_compat.register_tree_node(kind)
    return importlib.import_module(_MODULES[name]).BACKEND
