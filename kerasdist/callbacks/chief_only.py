"""A callback for the chief alone."""

from __future__ import annotations

from typing import final

import keras

from kerasdist.callbacks.delegating import DelegatingCallback
from kerasdist.job.current import current


@final
class ChiefOnly(DelegatingCallback):
    """Lets a callback act on the chief, and on no other worker.

    For what writes or prints. Nothing in it may need the other workers: no collective, no call of
    ``evaluate`` or ``predict``.

    Example::

        report = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print(logs))
        model.fit(x, y, callbacks=[kd.callbacks.ChiefOnly(report)])
    """

    def __init__(self, callback: keras.callbacks.Callback) -> None:
        """Wraps a callback.

        Args:
            callback: The callback.
        """
        job = current()
        super().__init__(callback, heard=job is None or job.is_chief)
