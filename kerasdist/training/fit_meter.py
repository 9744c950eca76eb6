"""The throughput of `fit`, for `kerasdist bench`, and the bandwidth between the replicas.

The launcher of a benchmark sets a variable for its workers; each `fit` of their script is then
measured by epochs, so that no step waits for a measurement.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, final

import keras
import numpy as np

from kerasdist import keras_compat
from kerasdist.api.functions import function
from kerasdist.api.replica_context import ReplicaContext
from kerasdist.api.scopes import get_replica_context
from kerasdist.job.results import BENCH, AllReduce, tell
from kerasdist.keras_compat import ops
from kerasdist.training.binding import Binding

if TYPE_CHECKING:
    from kerasdist.api.strategy import Strategy

_TRIES = 5
_LEAST_BYTES = 1 << 20


@final
@dataclass(frozen=True)
class Measured:
    """A call of `fit`.

    Attributes:
        backend: Keras's backend.
        workers: How many workers there are.
        replicas: How many replicas.
        device: The first device of this worker.
        batch: Examples in a global batch; None: the data do not tell.
        steps: The steps that were counted.
        seconds: How long they took.
        with_compilation: Whether the first epoch is among them, since there is no other.
        parameters: How many parameters are trained.
        all_reduce: A sum as large as the gradients; None for one replica.
    """

    backend: str
    workers: int
    replicas: int
    device: str
    batch: int | None
    steps: int
    seconds: float
    with_compilation: bool
    parameters: int
    all_reduce: AllReduce | None


def is_wanted() -> bool:
    """Returns whether this process is a worker of a benchmark."""
    return bool(os.environ.get(BENCH))


@final
class FitMeter(keras.callbacks.Callback):
    """Measures the epochs of a `fit`, and the sum of gradients after the first."""

    def __init__(self, binding: Binding, data: Any) -> None:
        """Makes the meter.

        Args:
            binding: That of the model.
            data: The data adapter of the training data.
        """
        super().__init__()
        self._binding = binding
        self._data = data
        self._epochs: list[float] = []
        self._began = 0.0
        self._open = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts the clock."""
        del epoch, logs
        self._began, self._open = time.perf_counter(), True

    def on_test_begin(self, logs: Any = None) -> None:
        """Stops the clock, as validation does not count."""
        del logs
        self._stop()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stops the clock; the logs, which Keras has read, have waited for the last step."""
        del epoch, logs
        self._stop()

    def _stop(self) -> None:
        if self._open:
            self._epochs.append(time.perf_counter() - self._began)
            self._open = False

    def on_train_end(self, logs: Any = None) -> None:
        """Prints what was measured, on the chief. All workers must call it."""
        del logs
        strategy, replicas = self._binding.strategy, self._binding.replicas
        counted = self._epochs[1:] or self._epochs
        model = keras_compat.model_of(self)
        parameters = sum(int(np.prod(one.shape)) for one in model.trainable_variables)
        count = max(4 * parameters, _LEAST_BYTES) // 4
        iterations = int(ops.convert_to_numpy(model.optimizer.iterations))
        steps = self._data.num_batches or iterations // len(self._epochs)
        job = replicas.job
        measured = Measured(
            backend=keras.backend.backend(),
            workers=1 if job is None else job.num_workers,
            replicas=replicas.num_replicas,
            device=str(replicas.devices[0]),
            batch=self._data.batch_size,
            steps=steps * len(counted),
            seconds=sum(counted),
            with_compilation=len(self._epochs) == 1,
            parameters=parameters,
            all_reduce=all_reduce(strategy, count) if replicas.num_replicas > 1 else None,
        )
        if strategy.is_chief:
            tell(asdict(measured))


def all_reduce(strategy: Strategy, count: int) -> AllReduce:
    """Measures the sum of an array of `count` float32 over all replicas.

    All workers must call it.
    """

    def total(value: Any) -> Any:
        here = get_replica_context()
        assert isinstance(here, ReplicaContext)
        return here.all_reduce("SUM", value)

    @function
    def step(value: Any) -> Any:
        return strategy.run(total, args=(value,))

    ones = np.ones(count, "float32")
    value = strategy.experimental_distribute_values_from_function(lambda _: ones)
    seconds: list[float] = []
    for _ in range(2 + _TRIES):  # the first ones trace and compile
        began = time.perf_counter()
        _wait(strategy, step(value))
        seconds.append(time.perf_counter() - began)
    return AllReduce(4 * count, float(np.median(seconds[2:])), strategy.num_replicas_in_sync)


def _wait(strategy: Strategy, value: Any) -> None:
    """Waits for a value that the framework may still compute."""
    for part in strategy.experimental_local_results(value):
        ops.convert_to_numpy(part[:1])
