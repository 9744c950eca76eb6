"""The settings of Keras that layers and operations depend on."""

from __future__ import annotations

import keras
from keras.src.backend.common import global_state

_threads_own = global_state.GLOBAL_STATE_TRACKER
_floatx = keras.config.floatx


def settings() -> tuple[str, str, bool]:
    """Returns the settings that a compiled function depends on beside its arguments and variables.

    Every step calls it, so it is fast.
    """
    own = _threads_own
    policy = getattr(own, "dtype_policy", None) or keras.config.dtype_policy()
    return policy.name, _floatx(), getattr(own, "stateless_scope", None) is not None
