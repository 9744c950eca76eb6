"""Keras's settings that every layer and operation may follow."""

from __future__ import annotations

import keras
from keras.src.backend.common import global_state

_threads_own = global_state.GLOBAL_STATE_TRACKER
_floatx = keras.config.floatx


def settings() -> tuple[str, str, bool]:
    """Returns what a compiled function depends on beside its arguments and variables.

    It is asked for in every step, so it takes as little as it can.

    Returns:
        The name of the default dtype policy, the default type of floats, and whether a
        ``keras.StatelessScope`` is open.
    """
    own = _threads_own
    policy = getattr(own, "dtype_policy", None) or keras.config.dtype_policy()
    return policy.name, _floatx(), getattr(own, "stateless_scope", None) is not None
