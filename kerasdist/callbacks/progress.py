"""Reports to the launcher where training is, for its live view."""

from __future__ import annotations

from typing import Any, final

import keras

from kerasdist.backends.base import metering
from kerasdist.backends.base.interface import ReplicaSet
from kerasdist.callbacks import usage
from kerasdist.callbacks.telemetry import times_of_worker
from kerasdist.job.status import Channel

SECONDS = 1.0
"""How much training lies between two reports."""


@final
class Progress(keras.callbacks.Callback):
    """Reports once a second. kerasdist adds it to `fit` where the launcher listens."""

    def __init__(self, meter: metering.Meter, channel: Channel, replicas: ReplicaSet) -> None:
        super().__init__()
        self._meter = meter
        self._channel = channel
        self._window = meter.window(SECONDS, lambda _: self._report("training"))
        job = replicas.job
        self._report_of_fit: dict[str, Any] = {"workers": 1 if job is None else job.num_workers}
        self._steps_before = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reports the epoch."""
        del logs
        given = self.params or {}
        self._steps_before = self._meter.steps
        self._report_of_fit |= {
            "epoch": epoch + 1,
            "epochs": given.get("epochs"),
            "steps": given.get("steps"),
        }
        self._report("training")

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Reports that validation begins."""
        del logs
        self._report("validation")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reports the epoch's logs."""
        del epoch
        self._report("training", logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Reports that `fit` is over."""
        self._report("after fit", logs)

    def _report(self, phase: str, logs: Any = None) -> None:
        figures = self._meter.figures(self._window)
        if figures.steps:
            samples = figures.samples
            self._report_of_fit |= {
                "samples_per_s": None if samples is None else samples / figures.seconds,
                **times_of_worker(figures),
            }
        # Reading logs waits for their step, so it happens once a second.
        loss = metering.scalars(logs or self._meter.logs).get("loss")
        if loss is not None:
            self._report_of_fit["loss"] = loss
        self._channel.tell(
            {
                **self._report_of_fit,
                "phase": phase,
                "step": self._meter.steps - self._steps_before,
                "memory": usage.of_host(),
                "gpus": usage.of_gpus(),
            }
        )
