"""What a step of `fit` costs under a strategy, against plain Keras and Keras's own distribution.

    python benchmarks/fit_overhead.py [--backends jax torch] [--models tiny] [--rounds 7]

Every contender lives in a process of its own, with the same cores, and they take turns: one epoch
each, round after round. A ratio is the median over the rounds of contender ÷ reference in the same
round, so that drift of the machine's speed cancels. A contender that dies is started again and its
deaths are counted: Keras's DataParallel on several CPU devices is known to abort.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

BACKENDS = ("tensorflow", "jax", "torch")
CONTENDERS = ("plain", "one device", "mirrored", "keras's own")
REPLICAS = 2
MAX_DEATHS = 5


@dataclass(frozen=True)
class Workload:
    """A model and its data: layer widths (input first), batch size, steps in an epoch."""

    widths: tuple[int, ...]
    batch: int
    steps: int


WORKLOADS = {
    "tiny": Workload(widths=(8, 1), batch=4, steps=400),
    "medium": Workload(widths=(784, 512, 512, 10), batch=256, steps=30),
}


class Contender:
    """A child process that runs one epoch on request and answers with its seconds."""

    def __init__(self, backend: str, workload: str, name: str) -> None:
        self._command = [sys.executable, __file__, "--child", backend, workload, name]
        self._environment = os.environ | {
            "KERAS_BACKEND": backend,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self.deaths = 0
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if self.deaths else None,
            text=True,
        )

    def seconds_of_one_epoch(self) -> float:
        """Runs an epoch; NaN if the contender cannot keep alive."""
        while self.deaths < MAX_DEATHS:
            try:
                self._process.stdin.write("go\n")
                self._process.stdin.flush()
                answer = self._process.stdout.readline()
                if answer:
                    return float(answer)
            except BrokenPipeError:
                pass
            self._process.wait()
            self.deaths += 1
            self._start()
        return float("nan")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def child(backend: str, workload_name: str, contender: str) -> None:
    """Trains one epoch for every line on standard input, after a warm-up."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever frameworks print goes to standard error
    workload = WORKLOADS[workload_name]
    fit = _fit_function(backend, workload, contender)
    fit()
    fit()
    for _ in sys.stdin:
        begin = time.perf_counter()
        fit()
        answers.write(f"{time.perf_counter() - begin}\n")
        answers.flush()


def _fit_function(backend: str, workload: Workload, contender: str):
    import contextlib

    import kerasdist as kd

    if contender in ("mirrored", "keras's own"):
        kd.config.set_logical_cpu_devices(REPLICAS)
    scope = contextlib.nullcontext()
    if contender == "one device":
        scope = kd.OneDeviceStrategy("cpu:0").scope()
    elif contender == "mirrored":
        scope = kd.MirroredStrategy([f"cpu:{i}" for i in range(REPLICAS)]).scope()
    elif contender == "keras's own":
        scope = _kerass_own_scope(backend)

    import keras
    import numpy as np

    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    rows = workload.batch * workload.steps
    x = rng.normal(size=(rows, workload.widths[0])).astype("float32")
    y = rng.normal(size=(rows, workload.widths[-1])).astype("float32")
    with scope:
        *hidden, last = workload.widths[1:]
        model = keras.Sequential(
            [
                keras.Input((workload.widths[0],)),
                *(keras.layers.Dense(width, activation="relu") for width in hidden),
                keras.layers.Dense(last),
            ]
        )
        model.compile(optimizer="adam", loss="mse")
    return lambda: model.fit(x, y, batch_size=workload.batch, epochs=1, shuffle=False, verbose=0)


def _kerass_own_scope(backend: str):
    if backend == "tensorflow":
        import tensorflow as tf

        return tf.distribute.MirroredStrategy([f"cpu:{i}" for i in range(REPLICAS)]).scope()
    import keras

    keras.distribution.set_distribution(
        keras.distribution.DataParallel(devices=[f"cpu:{i}" for i in range(REPLICAS)])
    )
    import contextlib

    return contextlib.nullcontext()


def measure(backend: str, workload: str, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds a step of each contender, one figure a round."""
    names = [n for n in CONTENDERS if not (backend == "torch" and n == "keras's own")]
    contenders = {name: Contender(backend, workload, name) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    try:
        for _ in range(rounds):
            for name, contender in contenders.items():
                seconds[name].append(contender.seconds_of_one_epoch())
        for name, contender in contenders.items():
            if contender.deaths:
                print(f"{backend}, {workload}: {name!r} died {contender.deaths} times")
    finally:
        for contender in contenders.values():
            contender.end()
    steps = WORKLOADS[workload].steps
    return {name: [s / steps for s in values] for name, values in seconds.items()}


def _ratio(values: list[float], reference: list[float]) -> float:
    pairs = [a / b for a, b in zip(values, reference, strict=True) if a == a and b == b]
    return statistics.median(pairs) if pairs else float("nan")


def main() -> None:
    """Prints one table a backend."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=7, help="counted epochs of each (at least 5)")
    options = parser.parse_args()
    console = Console(width=110)
    for backend in options.backends:
        cores = os.cpu_count()
        table = Table(title=f"{backend}: a step of fit, {REPLICAS} replicas on {cores} cores")
        for column in ("model", "contender", "ms a step", "samples/s", "÷ plain", "÷ Keras's own"):
            table.add_column(column, justify="right" if column not in ("model",) else "left")
        for model in options.models:
            figures = measure(backend, model, options.rounds)
            for name, values in figures.items():
                alive = [v for v in values if v == v]
                step = statistics.median(alive) if alive else float("nan")
                own = figures.get("keras's own")
                table.add_row(
                    model,
                    name,
                    f"{step * 1e3:.3f}",
                    f"{WORKLOADS[model].batch / step:,.0f}",
                    f"{_ratio(values, figures['plain']):.2f}",
                    f"{_ratio(values, own):.2f}" if own else "—",
                )
        console.print(table)


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1] == "--child":
        child(*sys.argv[2:])
    else:
        main()
