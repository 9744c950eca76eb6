"""Measures how long the steps of `fit` take, and how long the host waits in them.

Only the host's clock is read, and the functions of this module never wait for a device. If a
framework computes asynchronously, the measured times are those at which the host started the steps.
The host runs ahead of the device by a limited number of steps. So over many steps, the host starts
steps at the rate at which the device finishes them.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import keras
import numpy as np

from kerasdist.core.context import current
from kerasdist.input.fit_adapter import WrappedAdapter
from kerasdist.input.sharding import WorkerShard, arrays
from kerasdist.keras_compat import backend_name, ops

_NOTHING = nullcontext()


@final
@dataclass(frozen=True)
class Figures:
    """The measurements of the steps of one `Window`.

    Attributes:
        steps: The number of steps.
        samples: How many examples the global batches of the steps had; None if that is not known.
        seconds: How long the steps took, including the wait for the first batch.
        step_seconds: How long each step took, in order. If the host runs ahead of the device, there
            is one number per group of steps, the mean over the group.
        data: Seconds that the host waited for batches; None if that was not measured.
        collectives: Seconds that the host waited in collectives; None if that was not measured.
    """

    steps: int
    samples: int | None
    seconds: float
    step_seconds: Sequence[float]
    data: float | None
    collectives: float | None

    @property
    def own(self) -> float | None:
        """Seconds of the host's own work, without waits for other workers; None if not measured."""
        return None if self.collectives is None else self.seconds - self.collectives


@final
@dataclass(frozen=True)
class Flops:
    """Floating-point operations of matrix products and convolutions.

    Attributes:
        per_sample: Operations for one example in a training step: three times the operations of the
            forward pass.
        peak: Operations that all devices can do per second, in the type in which the model
            computes.
    """

    per_sample: float | None = None
    peak: float | None = None

    def utilization(self, figures: Figures) -> float | None:
        """Returns the fraction of the peak that a window's steps used; None if it is not known."""
        if self.per_sample is None or self.peak is None or figures.samples is None:
            return None
        return self.per_sample * figures.samples / (figures.seconds * self.peak)


@final
class Window:
    """The measurements of some consecutive steps.

    A `Meter` adds each step to all of its windows. After each `every` seconds of training the
    window calls `listener`.
    """

    def __init__(self, meter: Meter, every: float, listener: Callable[[Window], object]) -> None:
        self._meter = meter
        self._every = every
        self._listener = listener
        self._clear()

    def _clear(self) -> None:
        self._seconds = self._data = self._collectives = 0.0
        self._calls = array("d")  # seconds, steps and samples per call of the train function
        self._measured: list[Any] = []
        # The values of tensors that were in `_measured` until their values were read. Each array
        # has one row per tensor.
        self._rows: list[np.ndarray[Any, Any]] = []

    def add(self, seconds: float, steps: int, samples: int | None, measured: Any) -> None:
        """Adds the steps of a call of the train function.

        `add_time` has already added the call's time. `Meter.done` explains `measured`.
        """
        self._calls.extend((seconds, steps, math.nan if samples is None else samples))
        if measured is not None:
            self._measured.append(measured)
            if len(self._measured) == _MOST_TENSORS:
                self._read_measured()
        if self._seconds >= self._every:
            self._listener(self)

    def add_time(self, seconds: float, data: float, collectives: float) -> None:
        """Adds training time, and the parts of it in which the host waited for data or workers."""
        self._seconds += seconds
        self._data += data
        self._collectives += collectives

    def _read_measured(self) -> None:
        if self._measured:
            self._rows.append(ops.convert_to_numpy(ops.stack(self._measured)))
            self._measured.clear()

    def take(self) -> Figures:
        """Returns the measurements of the window's steps, and starts the next window."""
        seconds, steps, samples = np.array(self._calls).reshape(-1, 3).T
        data, meter = self._data, self._meter
        self._read_measured()
        if self._rows:  # On TensorFlow a graph has made one row per call of the train function.
            samples, steps, waits = np.concatenate(self._rows).T
            data += float(waits.sum())
        figures = Figures(
            steps=int(steps.sum()),
            samples=None if np.isnan(samples).any() else int(samples.sum()),
            seconds=self._seconds,
            step_seconds=_grouped(seconds, steps, meter.steps_ahead),
            data=min(data, self._seconds) if meter.knows_data else None,
            collectives=self._collectives if meter.knows_collectives else None,
        )
        self._clear()
        return figures


_MOST_TENSORS = 256
"""How many tensors a window collects before it reads the values of all of them at once."""


@final
class Meter(keras.callbacks.Callback):
    """Records the training steps of one call of `fit`; the time of validation is left out.

    Attributes:
        steps: The number of steps, counted as `steps_per_execution` for each call of the train
            function. The last call of an epoch may really have run fewer steps.
        logs: The logs that the last step returned.
        source: The data adapter of this call of `fit`.
        knows_data: Whether the time that the host waits for batches is measured.
        knows_collectives: Whether the time that the host waits in collectives is measured.
        steps_ahead: How many steps the host may start before a device has finished the first of
            these steps.
        flops: The floating-point operations of the model's training; None until they are counted.
    """

    def __init__(
        self, *, knows_data: bool = True, knows_collectives: bool, steps_ahead: int
    ) -> None:
        super().__init__()
        self.steps = 0
        self.logs: Any = None
        self.knows_data = knows_data
        self.knows_collectives = knows_collectives
        self.steps_ahead = steps_ahead
        self.flops: Flops | None = None
        self._windows: list[Window] = []
        self._watchers: list[Callable[[int], None]] = []
        self.source: Any = None
        self._last = self._data = self._collectives = 0.0
        self._calls = 0

    def window(self, every: float, listener: Callable[[Window], object]) -> Window:
        """Adds a `Window`, and calls `listener` with it after each `every` seconds of training."""
        self._windows.append(Window(self, every, listener))
        return self._windows[-1]

    def watch(self, watcher: Callable[[int], None]) -> None:
        """After each call of the train function, calls `watcher` with the count of steps so far."""
        self._watchers.append(watcher)

    def follow(self, adapter: Any) -> Any:
        """Returns a data adapter that measures how long Keras's loop waits for batches.

        On TensorFlow a graph reads the batches, so the graph itself measures this time.
        """
        self.source = adapter
        return adapter if backend_name() == "tensorflow" else _MeteredAdapter(adapter, self)

    def on_epoch_begin(self, epoch: int, logs: dict[str, object] | None = None) -> None:
        """Starts the clock."""
        self._calls = 0
        self._data = self._collectives = 0.0
        self._last = time.perf_counter()
        current.meter = self

    def on_test_begin(self, logs: dict[str, object] | None = None) -> None:
        """Stops the clock, because validation begins."""
        self._pause()

    def on_epoch_end(self, epoch: int, logs: dict[str, object] | None = None) -> None:
        """Stops the clock."""
        self._pause()

    def _pause(self) -> None:
        if current.meter is not self:
            return
        current.meter = None
        self._add_time()

    def _add_time(self) -> float:
        """Adds the time since the last call of this method to each window; returns this time."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        for window in self._windows:
            window.add_time(seconds, self._data, self._collectives)
        self._data = self._collectives = 0.0
        return seconds

    def done(self, steps: int, samples: int | None, logs: Any = None, measured: Any = None) -> None:
        """Records a call of the train function that has returned `logs`.

        If `samples` is None, the numbers of steps and samples are computed from what the data
        adapter knows. `measured` is a tensor of three numbers from a graph: samples, steps, and
        seconds of waiting for batches. If it is given, windows use its numbers instead of `steps`
        and `samples`.
        """
        seconds = self._add_time()
        self.steps += steps
        self.logs = logs
        self._calls += 1
        if samples is None:
            steps, samples = self._described(steps)
        for window in self._windows:
            window.add(seconds, steps, samples, measured)
        for watcher in self._watchers:
            watcher(self.steps)

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields batches, and adds up the time that the host waits for them."""
        while True:
            begin = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._data += time.perf_counter() - begin
            yield batch

    @contextmanager
    def in_collective(self) -> Generator[None]:
        """Adds the time inside of the block to the time that the host waited in collectives."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._collectives += time.perf_counter() - begin

    def _described(self, steps: int) -> tuple[int, int | None]:
        """Returns how many steps the last call of the train function really took.

        Also returns how many examples these steps had, or None if the adapter does not know the
        size of the last batch.
        """
        source = self.source
        over = 0 if source.num_batches is None else self._calls * steps - source.num_batches
        count = steps - max(over, 0)
        if source.batch_size is None or source.has_partial_batch is None:
            return count, None
        samples = count * source.batch_size
        if over >= 0 and source.num_batches is not None and source.has_partial_batch:
            samples += source.partial_batch_size - source.batch_size
        return count, samples


def _grouped(seconds: Any, steps: Any, group: int) -> list[float]:
    """Returns the seconds per step of groups of calls; a group has about `group` steps.

    If the last group has fewer than `group` steps, it is joined to the group before.
    """
    numbers = (np.cumsum(steps) - steps) // group  # the group of steps in which each call begins
    if numbers.size and steps[numbers == numbers[-1]].sum() < group:
        numbers = np.minimum(numbers, max(numbers[-1] - 1, 0))  # joins the last two groups
    sums = [np.bincount(numbers.astype(int), weights=one) for one in (seconds, steps)]
    return [float(time / count) for time, count in zip(*sums, strict=True) if count]


def waiting_for_workers() -> AbstractContextManager[None]:
    """Returns a context; time spent in its block counts as time waited in collectives."""
    return _NOTHING if current.meter is None else current.meter.in_collective()


def rows_of(batch: object) -> int:
    """Returns how many examples a global batch has."""
    if isinstance(batch, WorkerShard):
        return batch.total
    return next((leaf.shape[0] for leaf in arrays(batch)), 0)


@final
class _MeteredAdapter(WrappedAdapter):
    """Reports to a meter how long Keras's loop waits for batches."""

    def __init__(self, inner: Any, meter: Meter) -> None:
        super().__init__(inner)
        self._meter = meter

    def begun(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Returns the inner adapter's batches, and lets the meter time the waits for them."""
        return self._meter.timed(make())
