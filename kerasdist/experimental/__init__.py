"""Features whose names and arguments may still change."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kerasdist.core.earlier_names import resolve

if TYPE_CHECKING:
    from kerasdist.callbacks import BackupAndRestore

__all__ = ["preempt"]


def preempt(
    backup: BackupAndRestore, signals: Sequence[signal.Signals] = (signal.SIGTERM,)
) -> None:
    """Makes `fit` write a backup and end on all workers, when a signal comes to any worker.

    Schedulers send the signal SIGTERM some time before they take a machine away. After the next
    batch all workers save a backup and end their scripts with exit code 76
    (`kerasdist.job.interruption.ExitCode` ``.PREEMPTED``). A restarted run continues exactly at
    that batch. Outside of `fit` the signal ends the process at once, with exit code 128 plus the
    signal's number. So does a second signal during `fit`.

    After every batch, each worker checks whether one of the workers got a signal. As long as none
    did, this check sends no message, and takes a fraction of a millisecond.

    Example::

        backup = kd.callbacks.BackupAndRestore("/shared/backups")
        kd.experimental.preempt(backup)
        model.fit(x, y, callbacks=[backup])

    Args:
        backup: The `BackupAndRestore` callback of the `fit` that the signal shall end.
        signals: The signals that end `fit`.

    Raises:
        ValueError: If the call is not in the main thread, which alone may set signal handlers.
    """

    def asked(number: int, frame: object) -> None:
        if not backup.ask_to_leave():
            raise SystemExit(128 + number)

    for number in signals:
        signal.signal(number, asked)
    backup.listens = True


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Returns what kerasdist has in place of a name in ``tf.distribute.experimental``.

        If kerasdist has no counterpart of the name, the error says what to write instead.
        """
        return resolve("kerasdist.experimental", importlib.import_module("kerasdist"), name)
