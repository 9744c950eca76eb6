"""What may still change its name or its shape."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kerasdist.experimental.preemption import preempt

__all__ = ["preempt"]

_HOMES = {"preempt": "preemption"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kerasdist.experimental' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"kerasdist.experimental.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
