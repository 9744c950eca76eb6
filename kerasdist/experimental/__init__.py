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
    """Lets a signal to any worker end `fit` on all of them, with a backup.

    Schedulers send SIGTERM some time before they take a machine away. After the next batch all
    workers back up and end their scripts with exit code 76 (`kerasdist.job.interruption.ExitCode`
    ``.PREEMPTED``); started again, the run goes on from that very batch. Outside of `fit` the
    signal ends the process at once, with 128 and the signal's number; so does a second one.

    Workers ask each other after every batch, which costs a fraction of a millisecond.

    Example::

        backup = kd.callbacks.BackupAndRestore("/shared/backups")
        kd.experimental.preempt(backup)
        model.fit(x, y, callbacks=[backup])

    Args:
        backup: The callback of the `fit` that is to be left.
        signals: Which signals.

    Raises:
        ValueError: If this is not the main thread, which alone can handle signals.
    """

    def asked(number: int, frame: object) -> None:
        if not backup.ask_to_leave():
            raise SystemExit(128 + number)

    for number in signals:
        signal.signal(number, asked)
    backup.listens = True


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Returns what ``tf.distribute.experimental`` has, and kerasdist no longer calls so."""
        return resolve("kerasdist.experimental", importlib.import_module("kerasdist"), name)
