"""Features whose names and arguments may still change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kerasdist.core import lazy

if TYPE_CHECKING:
    from kerasdist.experimental.preemption import preempt

__all__ = ["preempt"]

_HOMES = {"preempt": "preemption"}

__getattr__, __dir__ = lazy.names(__name__, _HOMES)
