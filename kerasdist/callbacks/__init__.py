"""Callbacks for `fit` on many workers; on one worker each does what makes sense there.

A public name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kerasdist.core import lazy

if TYPE_CHECKING:
    from kerasdist.callbacks.backup.backup_and_restore import BackupAndRestore
    from kerasdist.callbacks.broadcast import BroadcastGlobalVariables
    from kerasdist.callbacks.chief_only import ChiefOnly
    from kerasdist.callbacks.metrics_reduction import MetricsReduction
    from kerasdist.callbacks.model_checkpoint import ModelCheckpoint
    from kerasdist.callbacks.telemetry import Telemetry
    from kerasdist.callbacks.warmup import LearningRateWarmup

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
    "BackupAndRestore": "backup.backup_and_restore",
    "BroadcastGlobalVariables": "broadcast",
    "ChiefOnly": "chief_only",
    "LearningRateWarmup": "warmup",
    "MetricsReduction": "metrics_reduction",
    "ModelCheckpoint": "model_checkpoint",
    "Telemetry": "telemetry",
}

__getattr__, __dir__ = lazy.names(__name__, _HOMES)
