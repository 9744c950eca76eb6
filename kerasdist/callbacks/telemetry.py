"""Callbacks that report how fast training is: to files, to the launcher, and for benchmarks."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import platform
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, final

import keras
import numpy as np

from kerasdist import keras_compat
from kerasdist.api.functions import function
from kerasdist.api.replica_context import ReplicaContext
from kerasdist.api.scopes import get_replica_context
from kerasdist.backends import registry
from kerasdist.backends.base.interface import ReplicaSet
from kerasdist.backends.base.metering import Figures, Flops, Meter, Window
from kerasdist.backends.base.model_trainer import trainer_of
from kerasdist.core import __version__, gpus
from kerasdist.core.backend_choice import is_installed
from kerasdist.core.hardware import chip_of
from kerasdist.core.user_warnings import warn_user
from kerasdist.errors import UnsupportedError
from kerasdist.job import comparison
from kerasdist.job.launcher import AllReduce, Channel, print_result
from kerasdist.keras_compat import ops

if TYPE_CHECKING:
    from kerasdist.api.strategy import Strategy

SCHEMA = 2
"""The version number of the format of the JSON lines.

It increases when a field is added, removed or changed.
"""

_SECONDS = 1.0
"""The seconds of training between two reports to the launcher."""

_TRIES = 5
_LEAST_BYTES = 1 << 20

_STATM = Path("/proc/self/statm")


@final
class Telemetry(keras.callbacks.Callback):
    """Writes, while `fit` runs, how fast training is and how its time is spent.

    Each worker writes a file ``telemetry-worker-0.jsonl``, with one line of JSON for each window of
    time and for each epoch. The chief also writes a file for TensorBoard. A line has

    - ``samples_per_s``: how many examples all replicas together train on per second; null under
      `OneDeviceStrategy` on TensorFlow, unless the data are arrays;
    - ``step_ms``: the median time of a step, and the time below which 95 % of the steps stay;
    - ``share``: the fractions of the time in which the host waited for data, waited in collectives,
      and did the rest (``compute``). The fractions add up to 1. A fraction that is not measured is
      null, and its time counts as ``compute``;
    - ``mfu``: model FLOP utilization: the floating-point operations that the model needs, as a
      fraction (0 to 1) of those that the devices can do in the same time; null on CPUs and other
      devices that `kerasdist plan` does not know;
    - ``memory``: the memory of this process, and of the NVIDIA GPUs that it sees;
    - at the end of an epoch, on the chief, ``by_worker``: the time of a step on each worker, and
      ``slowest``: the worker for which the others wait, and how much longer its steps take.

    What is measured depends on the backend:

    - ``data`` is the time in which Keras's loop waits for the next batch, including the time to
      divide the batch and to send it to the devices. On TensorFlow the graph measures this time,
      except under `OneDeviceStrategy`, where it is not measured.
    - ``collectives`` is measured on PyTorch with several workers on CPUs: it is the time in which
      the host waits for other workers, without the time that overlaps with the backward pass. On
      JAX and TensorFlow collectives are a part of the compiled step, and on GPUs they run
      asynchronously to the host. In these cases a profile shows the collectives (``kerasdist run
      --profile``).
    - The time of a step is measured on the host. With JAX, and with any framework on GPUs, the host
      runs ahead of the device. The time of a single step then only shows how long the host takes to
      start the step. So ``step_ms`` uses the means of eight steps in these cases.

    Measuring never waits for a device. Workers wait for each other only at the end of an epoch, as
    they also do without this callback. All workers must have the callback.

    Example::

        telemetry = kd.callbacks.Telemetry("logs")
        model.fit(x, y, epochs=3, callbacks=[telemetry])
    """

    def __init__(
        self, log_dir: str | Path, *, every: float = 10.0, tensorboard: bool | None = None
    ) -> None:
        """Makes the callback.

        Args:
            log_dir: The folder of the files, which is made if it is missing. If it already has a
                file of an earlier run, new lines are appended to this file.
            every: The shortest length of a window, in seconds of training.
            tensorboard: Whether to write a file for TensorBoard; None means only if TensorBoard is
                installed.

        Raises:
            ValueError: If `every` is not positive.
            UnsupportedError: If TensorBoard is wanted but not installed. `fit` also raises this
                error, if the model was made outside of a strategy's scope.
        """
        super().__init__()
        if every <= 0:
            raise ValueError(f"Expected a positive number of seconds. Received: {every=}.")
        if tensorboard and not is_installed("tensorboard"):
            raise UnsupportedError(
                "Expected the package tensorboard, which writes TensorBoard's files. Received: "
                f"{tensorboard=}, without it. Install it: pip install tensorboard; or pass "
                "tensorboard=False, and read the JSON lines."
            )
        self.log_dir = Path(log_dir)
        self._every = every
        self._tensorboard = is_installed("tensorboard") if tensorboard is None else tensorboard
        self._meter: Meter | None = None
        self._replicas: ReplicaSet | None = None
        self._lines: IO[str] | None = None
        self._events: _EventFile | None = None
        self._epoch = 0

    def measures(self, meter: Meter, replicas: ReplicaSet) -> None:
        """Stores the meter that measures a call of `fit`, and the replicas that train in it."""
        self._meter, self._replicas = meter, replicas
        self._window = meter.window(self._every, self._write_window)
        self._of_epoch = meter.window(math.inf, self._write_window)

    def on_train_begin(self, logs: dict[str, object] | None = None) -> None:
        """Opens the files."""
        if self._meter is None or self._replicas is None:
            raise UnsupportedError(
                "Expected a model that was made in a strategy's scope, whose steps are measured. "
                f"Received: model={keras_compat.model_of(self).name!r}, made outside. For one "
                "device make it in kd.OneDeviceStrategy(...).scope()."
            )
        self.log_dir.mkdir(parents=True, exist_ok=True)
        path = self.log_dir / f"telemetry-worker-{self._replicas.rank}.jsonl"
        self._lines = path.open("a", encoding="utf-8")
        if self._tensorboard and self._replicas.rank == 0:
            self._events = _EventFile(self.log_dir)
        meter = self._meter
        self._flops = flops_of_fit(meter, keras_compat.model_of(self), self._replicas)
        start = {
            "host": platform.node(),
            "backend": keras_compat.backend_name(),
            "workers": self._replicas.num_workers,
            "replicas": self._replicas.num_replicas,
            "devices": [str(device) for device in self._replicas.devices],
            "measured": {"data": meter.knows_data, "collectives": meter.knows_collectives},
            "steps_in_group": meter.steps_ahead,
            "flops": asdict(self._flops),
            "kerasdist": __version__,
            "keras": keras.__version__,
        }
        self._write("start", start)

    def on_epoch_begin(self, epoch: int, logs: dict[str, object] | None = None) -> None:
        """Stores the number of the epoch."""
        self._epoch = epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, object] | None = None) -> None:
        """Writes the epoch's line. All workers must call this method."""
        assert self._replicas is not None
        self._write_window(self._window)
        figures = self._of_epoch.take()
        told: dict[str, object] = _described(figures, self._flops)
        job = self._replicas.job
        if job is not None:
            own = _times_of_worker(figures)
            workers = job.gather_object(f"telemetry of epoch {epoch + 1}", own)
            if job.is_chief:
                told |= {"by_worker": workers, "slowest": comparison.slowest(workers)}
        self._write("epoch", {**self._place(), **told})

    def on_train_end(self, logs: dict[str, object] | None = None) -> None:
        """Closes the files."""
        for file in (self._lines, self._events):
            if file is not None:
                # Closing fails if the disk is full. `_write` has then already warned.
                with contextlib.suppress(OSError):
                    file.close()
        self._lines = self._events = self._meter = self._replicas = None

    def _place(self) -> dict[str, int]:
        assert self._meter is not None
        return {"epoch": self._epoch + 1, "step": self._meter.steps}

    def _write_window(self, window: Window) -> None:
        assert self._meter is not None
        figures = window.take()
        if not figures.steps:
            return
        memory = {"host": memory_of_host(), "gpus": memory_of_gpus()}
        told = {**self._place(), **_described(figures, self._flops), "memory": memory}
        self._write("window", told)
        if self._events is not None:
            self._events.scalars(self._meter.steps, _curves(told))

    def _write(self, kind: str, fields: dict[str, object]) -> None:
        if self._lines is None or self._replicas is None:  # the files are not open
            return
        head = {"schema": SCHEMA, "kind": kind, "time": time.time(), "worker": self._replicas.rank}
        try:
            self._lines.write(json.dumps(head | fields) + "\n")
            self._lines.flush()
        except OSError as error:
            warn_user(
                f"{self._lines.name} takes no more lines: {error.strerror}. Training goes on, and "
                "writing is tried again for the next line."
            )


def flops_of_fit(meter: Meter, model: keras.Model, replicas: ReplicaSet) -> Flops:
    """Returns the result of `flops_of`, which is computed only once and then kept in the meter."""
    meter.flops = meter.flops or flops_of(model, replicas)
    return meter.flops


def flops_of(model: keras.Model, replicas: ReplicaSet) -> Flops:
    """Returns how many floating-point operations a training step needs for one example.

    The result also contains how many such operations all devices together can do per second.
    """
    kind = replicas.device_kind()
    chip = None if kind is None else chip_of(kind)
    if chip is None:
        return Flops()
    rate = chip.flops.get(model.compute_dtype)
    peak = None if rate is None else replicas.num_workers * len(replicas.devices) * rate
    variables = model.trainable_variables, model.non_trainable_variables
    shapes = [[keras.KerasTensor(one.shape, one.dtype) for one in each] for each in variables]
    try:
        inputs = keras_compat.shapes_of_example(model)
        forward = registry.current().count_flops(model.stateless_call, *shapes, *inputs)
    # Operations cannot be counted if the model must be called with real arrays, not only with their
    # shapes, or if its inputs have no fixed shapes.
    except Exception:  # noqa: BLE001
        return Flops(peak=peak)
    return Flops(None if forward is None else 3 * forward, peak)


def _described(figures: Figures, flops: Flops) -> dict[str, Any]:
    """Returns the measurements of a window as entries of a JSON line."""
    seconds = figures.seconds
    waits = {"data": figures.data, "collectives": figures.collectives}
    shares = {name: None if one is None else one / seconds for name, one in waits.items()}
    times = 1000 * np.array(figures.step_seconds or [seconds])
    return {
        "steps": figures.steps,
        "samples": figures.samples,
        "seconds": seconds,
        "samples_per_s": None if figures.samples is None else figures.samples / seconds,
        "mfu": flops.utilization(figures),
        "step_ms": {"median": float(np.median(times)), "95%": float(np.percentile(times, 95))},
        "share": {**shares, "compute": 1 - sum(one or 0.0 for one in shares.values())},
    }


def _times_of_worker(figures: Figures) -> dict[str, float | None]:
    """Returns a worker's times per step in milliseconds, as `comparison.slowest` expects them."""
    times = {"step_ms": figures.seconds, "own_ms": figures.own, "data_ms": figures.data}
    steps = max(figures.steps, 1)
    return {name: None if one is None else 1000 * one / steps for name, one in times.items()}


def _curves(told: dict[str, Any]) -> dict[str, float]:
    """Returns the values for TensorBoard's curves, from the entries of a JSON line."""
    curves = {
        "samples_per_s": told["samples_per_s"],
        "mfu": told["mfu"],
        **{f"step_ms/{name}": value for name, value in told["step_ms"].items()},
        **{f"share/{name}": value for name, value in told["share"].items()},
        "memory/host_bytes": told["memory"]["host"]["bytes"],
    }
    for number, gpu in enumerate(told["memory"]["gpus"]):
        curves |= {f"memory/gpu_{number}_bytes": gpu["bytes"], f"busy/gpu_{number}": gpu["busy"]}
    known = {name: value for name, value in curves.items() if value is not None}
    return {f"telemetry/{name}".replace("%", ""): value for name, value in known.items()}


@final
class _EventFile:
    """A new event file for TensorBoard, in a folder that is made if it is missing."""

    def __init__(self, folder: Path) -> None:
        # TensorBoard's own EventFileWriter imports TensorFlow if it is installed. So this class
        # writes the records without it.
        self._messages: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        records: Any = importlib.import_module("tensorboard.summary.writer.record_writer")
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{platform.node()}.{os.getpid()}.kerasdist"
        self._writer = records.RecordWriter((folder / name).open("wb"))
        self._write(self._messages.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a point to the curve of each value."""
        event = self._messages.Event(wall_time=time.time(), step=step)
        for name, value in values.items():
            event.summary.value.add(tag=name, simple_value=value)
        self._write(event)

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()


@final
class Progress(keras.callbacks.Callback):
    """Reports the progress of `fit` to the launcher once a second, if the launcher listens."""

    def __init__(self, meter: Meter, channel: Channel, replicas: ReplicaSet) -> None:
        super().__init__()
        self._meter = meter
        self._channel = channel
        self._window = meter.window(_SECONDS, lambda _: self._report("training"))
        self._report_of_fit: dict[str, object] = {"workers": replicas.num_workers}
        self._replicas = replicas
        self._steps_before = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, object] | None = None) -> None:
        """Reports the number of the epoch.

        Before the first report of `fit`, counts the floating-point operations of a training step.
        """
        self._flops = flops_of_fit(self._meter, keras_compat.model_of(self), self._replicas)
        given = self.params or {}
        self._steps_before = self._meter.steps
        self._report_of_fit |= {
            "epoch": epoch + 1,
            "epochs": given.get("epochs"),
            "steps": given.get("steps"),
        }
        self._report("training")

    def on_test_begin(self, logs: dict[str, object] | None = None) -> None:
        """Reports that validation begins."""
        self._report("validation")

    def on_epoch_end(self, epoch: int, logs: dict[str, object] | None = None) -> None:
        """Reports the epoch's logs."""
        self._report("training", logs)

    def on_train_end(self, logs: dict[str, object] | None = None) -> None:
        """Reports that `fit` has ended."""
        self._report("after fit", logs)

    def _report(self, phase: str, logs: dict[str, object] | None = None) -> None:
        figures = self._window.take()
        if figures.steps:
            samples = figures.samples
            self._report_of_fit |= {
                "samples_per_s": None if samples is None else samples / figures.seconds,
                "mfu": self._flops.utilization(figures),
                **_times_of_worker(figures),
            }
        # Reading the logs waits until the device has computed the step. So the logs are read only
        # when a report is made.
        loss = keras_compat.numbers_of(logs or self._meter.logs).get("loss")
        if loss is not None:
            self._report_of_fit["loss"] = loss
        self._channel.tell(
            {
                **self._report_of_fit,
                "phase": phase,
                "step": self._meter.steps - self._steps_before,
                "memory": memory_of_host(),
                "gpus": memory_of_gpus(),
            }
        )


@final
class Bench(keras.callbacks.Callback):
    """Measures the epochs of `fit`, and the time of an all-reduce, for `kerasdist bench`.

    The array of the all-reduce is as large as all gradients together, or 1 MiB if that is more. The
    callback has no methods for batches: if it had any, Keras would read the logs after each step,
    and so would wait until the device has computed them.
    """

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter
        self._window = meter.window(math.inf, Window.take)
        self._epochs: list[Figures] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, object] | None = None) -> None:
        """Stores the epoch's measurements.

        All steps have ended on the device, because Keras has already read their logs.
        """
        self._epochs.append(self._window.take())

    def on_train_end(self, logs: dict[str, object] | None = None) -> None:
        """Prints the measurements on the chief. All workers must call this method."""
        model = keras_compat.model_of(self)
        trainer = trainer_of(model)
        assert trainer is not None  # only models made in a strategy's scope are measured
        strategy, replicas = trainer.strategy, trainer.replicas
        counted = self._epochs[1:] or self._epochs  # the first epoch includes compilation
        parameters = sum(math.prod(one.shape) for one in model.trainable_variables)
        total = None
        if replicas.num_replicas > 1:
            total = asdict(all_reduce(strategy, max(4 * parameters, _LEAST_BYTES) // 4))
        if strategy.is_chief:
            print_result(
                {
                    "backend": keras_compat.backend_name(),
                    "workers": replicas.num_workers,
                    "replicas": replicas.num_replicas,
                    "device": str(replicas.devices[0]),
                    "batch": self._meter.source.batch_size,  # None if it is unknown
                    "steps": sum(one.steps for one in counted),
                    "seconds": sum(one.seconds for one in counted),
                    "with_compilation": len(self._epochs) == 1,
                    "parameters": parameters,
                    "all_reduce": total,
                }
            )


def all_reduce(strategy: Strategy, count: int) -> AllReduce:
    """Measures how long it takes to sum an array of `count` float32 values over all replicas.

    All workers must call this function.
    """

    def total(value: object) -> object:
        here = get_replica_context()
        assert isinstance(here, ReplicaContext)
        return here.all_reduce("SUM", value)

    @function
    def step(value: object) -> object:
        return strategy.run(total, args=(value,))

    ones = np.ones(count, "float32")
    value = strategy.experimental_distribute_values_from_function(lambda _: ones)
    seconds: list[float] = []
    for _ in range(2 + _TRIES):  # the first two calls may compile, and do not count
        began = time.perf_counter()
        for part in strategy.experimental_local_results(step(value)):
            ops.convert_to_numpy(part[:1])  # this waits for a value that is still being computed
        seconds.append(time.perf_counter() - began)
    return AllReduce(4 * count, float(np.median(seconds[2:])), strategy.num_replicas_in_sync)


def memory_of_host() -> dict[str, int | None]:
    """Returns the memory of this process in bytes, now and at its peak."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    now = None
    if _STATM.exists():
        now = int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")
        peak = max(peak, now)  # the kernel updates the peak only from time to time
    return {"bytes": now, "peak_bytes": peak}


def memory_of_gpus() -> list[dict[str, object]]:
    """Returns the memory and the utilization of the NVIDIA GPUs that this process sees.

    Sizes are in bytes. The list is empty if there is no such GPU.
    """
    return [
        {"bytes": one.used, "of_bytes": one.total, "busy": one.busy} for one in _watch().usage()
    ]


@cache
def _watch() -> gpus.Watch:
    return gpus.Watch(gpus.visible())
