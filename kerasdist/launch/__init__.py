"""Starts the workers of a job, and ends them: ``kerasdist run``, and ``kerasdist.launch(fn)``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, final


@final
class _Package(ModuleType):
    """Lets ``kerasdist.launch``, the name of this package, be called as the function it has."""

    def __call__(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> object:
        """Runs a function in several workers; see `kerasdist.launch.function.launch`."""
        from kerasdist.launch.function import launch  # the command needs none of it

        return launch(fn, *args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        """Pickles it by its name, as cloudpickle does modules."""
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
