"""Callbacks for `fit` on many workers, which also work on a single worker.

Keras's own callbacks work without these: callbacks that write files run on the chief, and callbacks
that make decisions get the logs of the global batch. The callbacks here serve jobs of several
workers, or do what Keras's callbacks cannot do:

- `BackupAndRestore` saves backups of a run; after a restart the run continues at the exact batch.
- `ModelCheckpoint` is Keras's callback; with ``save="async"`` it writes files during training.
- `Telemetry` writes how fast training is, and how its time is spent.
- `ChiefOnly` lets another callback run only on the chief, for your own callbacks that write or
print.

Users of Horovod know three of the callbacks:

- `LearningRateWarmup` lets the learning rate grow in the first epochs.
- `BroadcastGlobalVariables` gives all workers the chief's variables as training begins.
- `MetricsReduction` reduces logs of your own over the workers.

Example::

    backup = kd.callbacks.BackupAndRestore("backups")
    model.fit(x, y, epochs=2, callbacks=[backup, kd.callbacks.ChiefOnly(report)])

A callback of your own that changes training must do the same on every worker. If it changes weights
on only one worker, a `DisagreementError` reports the difference at the end of the epoch. If it sets
``model.stop_training`` on any worker, all workers stop after the same batch.

The guide "Callbacks" says which callbacks, Keras's and others, act on which workers. The guide
"Failures, backups and preemption" says what a backup contains and how often to save one. The guide
"Watch a job" says what is measured.
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
