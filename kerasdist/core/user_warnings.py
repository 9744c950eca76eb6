"""Warnings that name a line of the user's script, even if they arise deep inside of Keras."""

from __future__ import annotations

import os
import sys
import sysconfig
import warnings
from pathlib import Path
from weakref import WeakKeyDictionary

PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
"""The folder of kerasdist."""

_PATHS = ("stdlib", "purelib", "platlib", "scripts")

LIBRARIES = (PACKAGE, *(f"{sysconfig.get_path(name)}{os.sep}" for name in _PATHS))
"""The folders of code that is not the user's: kerasdist, Python, installed packages."""

# `warn_user` skips the frames of these packages. Code of any other installed package may be the
# user's own.
_PACKAGES = frozenset(
    ("kerasdist", "keras", "tensorflow", "torch", "jax", "contextlib", "functools", "threading")
)


def plural(count: int, noun: str) -> str:
    """Returns a number with its noun: ``1 worker``, ``2 workers``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def warn_user(message: str) -> None:
    """Gives a `UserWarning` that names the innermost line of code outside of `_PACKAGES`."""
    frame, level = sys._getframe(1), 2
    while frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
        if frame.f_back is None:  # a framework has started this thread, so no line is the user's
            level = 2
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


# For each object about which `warn_once` has warned: the subject of each of these warnings, or the
# message of a warning that has no subject.
_warned: WeakKeyDictionary[object, set[str]] = WeakKeyDictionary()


def warn_once(owner: object, message: str, subject: str = "") -> None:
    """Gives a warning about an object, as `warn_user` does, unless the same one was given before.

    Two warnings are the same if they have the same subject. Without subjects, they are the same if
    they have the same message.
    """
    known = _warned.setdefault(owner, set())
    if (subject or message) not in known:
        known.add(subject or message)
        warn_user(message)
