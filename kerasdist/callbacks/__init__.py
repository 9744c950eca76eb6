"""Callbacks for `fit` on many workers, which also work on a single worker.

You can use Keras's own callbacks as they are: callbacks that write files run on the chief, and
callbacks that make decisions get the logs of the global batch. In addition, kerasdist has these
callbacks:

- `BackupAndRestore` saves backups of a run; after a restart the run continues at the exact batch.
- `ModelCheckpoint` is Keras's callback; with ``save="async"`` it writes files during training.
- `Telemetry` writes how fast training is, and how its time is spent.
- `ChiefOnly` wraps a callback of your own that writes or prints, so that it runs only on the chief.

Three more callbacks do the same as callbacks of Horovod:

- `LearningRateWarmup` lets the learning rate grow in the first epochs.
- `BroadcastGlobalVariables` gives all workers the chief's variables as training begins.
- `MetricsReduction` averages, over the workers, the logs that your own code adds. It can also take
their sum, minimum or maximum.

Example::

    backup = kd.callbacks.BackupAndRestore("backups")
    model.fit(x, y, epochs=2, callbacks=[backup, kd.callbacks.ChiefOnly(report)])

If a callback of your own changes training, it must make the same changes on every worker. If the
callback changes weights on only one worker, a `DisagreementError` reports the difference at the end
of the epoch. If the callback sets ``model.stop_training`` on any worker, all workers stop after the
same batch.

The guide "Callbacks" says on which workers each callback acts. The guide "Failures, backups and
preemption" says what a backup contains and how often to save one. The guide "Watch a job" says what
`Telemetry` measures.
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
