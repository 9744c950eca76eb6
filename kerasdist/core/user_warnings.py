"""Warnings that name a line of the user's script, however deep in Keras they are raised."""

from __future__ import annotations

import sys
import warnings

# Packages that are not the user's script.
_LIBRARIES = frozenset(
    ("kerasdist", "keras", "tensorflow", "torch", "jax", "contextlib", "functools", "threading")
)


def warn_user(message: str) -> None:
    """Gives a `UserWarning` that names the innermost line outside of the libraries."""
    frame, level = sys._getframe(1), 2
    while frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        if frame.f_back is None:  # a framework's thread, without a script
            level = 2
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
