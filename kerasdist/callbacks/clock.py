"""Starts and stops the clock of a call of `fit`."""

from __future__ import annotations

from typing import Any, final

import keras

from kerasdist.backends.base.metering import Meter


@final
class Clock(keras.callbacks.Callback):
    """Runs a meter's clock while an epoch's steps run.

    Callbacks that read the meter come after this one.
    """

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the clock."""
        del epoch, logs
        self._meter.begin_epoch()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Stops the clock: what follows is validation."""
        del logs
        self._meter.pause()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Stops the clock."""
        del epoch, logs
        self._meter.pause()
