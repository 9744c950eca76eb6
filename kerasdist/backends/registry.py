"""Which backend is in use: Keras's own choice decides, and only that one is imported."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from operator import attrgetter
from typing import Any

from kerasdist import keras_seam
from kerasdist.backends.base import Backend
from kerasdist.errors import UnsupportedError
from kerasdist.values import Mirrored, PerReplica

_MODULES = {
    "tensorflow": "kerasdist.backends.tensorflow.backend",
    "jax": "kerasdist.backends.jax.backend",
    "torch": "kerasdist.backends.torch.backend",
}


_TORCH_STATES = "kerasdist.backends.torch.states"


@cache
def current() -> Backend:
    """Returns the backend that Keras runs on, importing Keras and this one framework.

    Raises:
        UnsupportedError: If Keras runs on a backend that kerasdist has no engine for.
    """
    name = keras_seam.backend_name()
    if name not in _MODULES:
        raise UnsupportedError(
            f"Expected Keras to run on one of {sorted(_MODULES)}. Received: backend={name!r}. Set "
            "the variable KERAS_BACKEND before Keras is imported."
        )
    return importlib.import_module(_MODULES[name]).BACKEND


def torch_states() -> Any | None:
    """Returns how to keep PyTorch's generators, None where the script does not use PyTorch.

    Its ``DataLoader`` is a source of data on every backend.
    """
    return importlib.import_module(_TORCH_STATES) if "torch" in sys.modules else None


# Here, since whoever has distributed values has asked for a backend.
for _kind in (PerReplica, Mirrored):
    keras_seam.register_tree_node(_kind, attrgetter("values"))
