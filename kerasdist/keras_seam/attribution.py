"""Keras's warnings, as if no hook stood between Keras and the user's code.

A warning says from how many frames above it comes, and the hooks are such frames: it would name a
file of kerasdist. And where each replica runs the same code, each would give the same warning.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, final

from keras.src.models.model import Trainer as BackendTrainer

# The modules of Keras whose warnings pass the hooks, or are given in replicas.
_MODULES = (
    "keras.src.layers.layer",
    "keras.src.models.functional",
    "keras.src.optimizers.base_optimizer",
    "keras.src.trainers.data_adapters",
    "keras.src.trainers.data_adapters.py_dataset_adapter",
    "keras.src.trainers.epoch_iterator",
    "keras.src.trainers.trainer",
    BackendTrainer.__module__,
)

# As `warnings.warn` counts from `_Warnings.warn`.
_LEVEL_OF_CALLER = 2

_PACKAGE = str(Path(__file__).parents[1]) + "/"


@final
class _Warnings:
    """The module `warnings`, for a module of Keras."""

    def __init__(self, repeats: Callable[[], bool]) -> None:
        self._repeats = repeats
        self._given: set[tuple[str, int, str]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(warnings, name)

    def warn(
        self,
        message: Warning | str,
        category: type[Warning] | None = None,
        stacklevel: int = 1,
        source: Any = None,
    ) -> None:
        """Does what ``warnings.warn`` does, of whose arguments Keras uses these."""
        frame, level = sys._getframe(1), _LEVEL_OF_CALLER
        for _ in range(stacklevel - 1):
            frame, distance = _outer(frame)
            level += distance
        # What was received differs by replica: its rows.
        key = frame.f_code.co_filename, frame.f_lineno, str(message).partition("Received")[0]
        if self._repeats() and key in self._given:
            return
        self._given.add(key)
        # Looked up now: a test may have put a function of its own there.
        warnings.warn(message, category, level, source)


def install_attribution(repeats: Callable[[], bool]) -> None:
    """Lets Keras's warnings name the line that they would name without hooks.

    Args:
        repeats: Returns whether the calling code runs once a replica, so that a warning that was
            given is not to be given again.
    """
    shown = _Warnings(repeats)
    for name in _MODULES:
        module: Any = importlib.import_module(name)
        module.warnings = shown


def _outer(frame: FrameType) -> tuple[FrameType, int]:
    """Returns the next frame outside of kerasdist, and how far up it is as `warnings` counts."""
    outer, distance = frame.f_back, 1
    while outer is not None and outer.f_code.co_filename.startswith(_PACKAGE):
        outer, distance = outer.f_back, distance + 1
    return (frame, 0) if outer is None else (outer, distance)
