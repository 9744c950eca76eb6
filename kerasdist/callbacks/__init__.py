"""Callbacks for `fit` on many workers; on one worker each does what makes sense there.

Keras's own callbacks need none of them: those that write do so on the chief, and those that decide
see the logs of the global batch. These do what one process does not need,
or what Keras's cannot do:

- `BackupAndRestore` backs up a run, which goes on at the exact batch when it is started again.
- `ModelCheckpoint` is Keras's, and with ``save="async"`` writes its files while training goes on.
- `Telemetry` writes how fast training is, and where its time goes.
- `ChiefOnly` lets another callback act on the chief alone: for your own that write or print.

Users of Horovod know three of them:

- `LearningRateWarmup` lets the learning rate grow in the first epochs.
- `BroadcastGlobalVariables` gives all workers the chief's variables as training begins.
- `MetricsReduction` reduces logs of your own over the workers.

Example::

    backup = kd.callbacks.BackupAndRestore("backups")
    model.fit(x, y, epochs=2, callbacks=[backup, kd.callbacks.ChiefOnly(report)])

A callback of your own that changes training must do the same on every worker. If it changes weights
on one alone, a `DisagreementError` says so at the end of the epoch. One that sets
``model.stop_training`` on any worker stops all of them after the same batch.

Which callbacks of Keras, and of others, act on which workers stands in the guide "Callbacks"; what
a backup holds, and how often it pays, in "Failures, backups and preemption"; what is measured, in
"Watch a job".
"""

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
