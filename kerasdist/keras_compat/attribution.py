"""Keras's warnings, as if no hook were between Keras and the user's code.

A warning counts frames to find the line that it names. Hooks add frames, so it would name a file of
kerasdist. And each replica that runs the code would give the same warning again.
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

from kerasdist.keras_compat.variables import trial

# The modules of Keras that warn in functions that a hook calls, or in replicas.
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

# The `stacklevel` of the caller, counted from `_Warnings.warn`.
_LEVEL_OF_CALLER = 2

_PACKAGE = str(Path(__file__).parents[1]) + "/"


@final
class _Warnings:
    """Stands in for the module `warnings` in a module of Keras."""

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
        """Does the same as ``warnings.warn``, with the arguments that Keras uses."""
        if trial() is not None:
            return  # the step itself warns again
        frame, level = sys._getframe(1), _LEVEL_OF_CALLER
        for _ in range(stacklevel - 1):
            frame, distance = _outer(frame)
            level += distance
        # The received value differs by replica, so it does not count as another warning.
        key = frame.f_code.co_filename, frame.f_lineno, str(message).partition("Received")[0]
        if self._repeats() and key in self._given:
            return
        self._given.add(key)
        # Looked up at each call: a test may have replaced it.
        warnings.warn(message, category, level, source)


def install_attribution(repeats: Callable[[], bool]) -> None:
    """Lets Keras's warnings name the line that they would name without hooks."""
    shown = _Warnings(repeats)
    for name in _MODULES:
        module: Any = importlib.import_module(name)
        module.warnings = shown


def _outer(frame: FrameType) -> tuple[FrameType, int]:
    """Returns the next frame outside of kerasdist, and its distance as `warnings` counts."""
    outer, distance = frame.f_back, 1
    while outer is not None and outer.f_code.co_filename.startswith(_PACKAGE):
        outer, distance = outer.f_back, distance + 1
    return (frame, 0) if outer is None else (outer, distance)
