"""Callbacks for `fit` on many workers; on one worker each does what makes sense there.

A public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kerasdist.callbacks.backup_and_restore import BackupAndRestore
    from kerasdist.callbacks.chief_only import ChiefOnly
    from kerasdist.callbacks.horovod import (
        BroadcastGlobalVariables,
        LearningRateWarmup,
        MetricsReduction,
    )
    from kerasdist.callbacks.model_checkpoint import ModelCheckpoint
    from kerasdist.callbacks.telemetry import Telemetry

__all__ = [
    "BackupAndRestore",
    "BroadcastGlobalVariables",
    "ChiefOnly",
    "LearningRateWarmup",
    "MetricsReduction",
    "ModelCheckpoint",
    "Telemetry",
]

_HOMES = {
    "BackupAndRestore": "backup_and_restore",
    "BroadcastGlobalVariables": "horovod",
    "ChiefOnly": "chief_only",
    "LearningRateWarmup": "horovod",
    "MetricsReduction": "horovod",
    "ModelCheckpoint": "model_checkpoint",
    "Telemetry": "telemetry",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
