"""Reduces logs that each worker computed by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import keras

from kerasdist.job.job import current_job

_REDUCTIONS = {
    "mean": lambda values: sum(values) / len(values),
    "sum": sum,
    "min": min,
    "max": max,
    "chief": lambda values: values[0],
}


@final
class MetricsReduction(keras.callbacks.Callback):
    """Reduces the logs of an epoch over the workers, before later callbacks see them.

    What `fit` itself reports is of the global batch already, on every worker, and stays as it is.
    This is for values that a worker's own code puts into the logs: place it behind that callback,
    and before EarlyStopping, ReduceLROnPlateau or ModelCheckpoint.

    Example::

        model.fit(x, y, callbacks=[kd.callbacks.MetricsReduction()])

    Source: Horovod's ``MetricAverageCallback``.
    """

    def __init__(self, reductions: Mapping[str, str] | None = None) -> None:
        """Makes the callback.

        Args:
            reductions: By the name of a log ``"mean"``, ``"sum"``, ``"min"``, ``"max"``, or
                ``"chief"`` for the chief's value. All others are averaged.

        Raises:
            ValueError: If there is no such reduction.
        """
        super().__init__()
        self._reductions = dict(reductions or {})
        unknown = {name: how for name, how in self._reductions.items() if how not in _REDUCTIONS}
        if unknown:
            raise ValueError(
                f"Expected one of {sorted(_REDUCTIONS)} for each log. Received: "
                f"reductions={unknown!r}."
            )

    def on_epoch_end(self, epoch: int, logs: dict[str, object] | None = None) -> None:
        """Reduces the logs in place. All workers must call it, with logs of the same names."""
        job = current_job()
        if job is None or not logs:
            return
        own = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        label = f"logs of epoch {epoch + 1}: {sorted(own)}"
        everyone: Sequence[dict[str, float]] = job.gather_object(label, own)
        reduced: dict[str, float] = {}
        for name in own if job.is_chief else ():
            values = [theirs[name] for theirs in everyone]
            if any(value != values[0] for value in values):
                reduced[name] = _REDUCTIONS[self._reductions.get(name, "mean")](values)
        logs.update(job.broadcast_object(label, reduced))
