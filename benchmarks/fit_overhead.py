"""What a step of `fit` costs under a strategy, against plain Keras and Keras's own distribution.

    python benchmarks/fit_overhead.py [--backends jax torch] [--models tiny] [--rounds 7]

Every contender lives in a process of its own, with the same cores, and they take turns: one epoch
each, round after round (see alternating.py). Deaths are counted: Keras's DataParallel on several
CPU devices is known to abort.
"""

from __future__ import annotations

import argparse
import os
import sys

from alternating import Contender, measure, median, ratio, serve
from rich.console import Console
from rich.table import Table
from workloads import WORKLOADS, dense_model

BACKENDS = ("tensorflow", "jax", "torch")
CONTENDERS = ("plain", "one device", "mirrored", "keras's own")
REPLICAS = 2


def _fit_function(backend: str, workload_name: str, contender: str):
    workload = WORKLOADS[workload_name]
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

    import numpy as np

    rng = np.random.default_rng(0)
    rows = workload.batch * workload.steps
    x = rng.normal(size=(rows, workload.widths[0])).astype("float32")
    y = rng.normal(size=(rows, workload.widths[-1])).astype("float32")
    with scope:
        model = dense_model(workload)
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


def contenders_of(backend: str, workload: str) -> dict[str, Contender]:
    names = [n for n in CONTENDERS if not (backend == "torch" and n == "keras's own")]
    return {name: Contender(__file__, backend, workload, name) for name in names}


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
            figures = measure(contenders_of(backend, model), options.rounds)
            for name, values in figures.items():
                step = median(values) / WORKLOADS[model].steps
                own = figures.get("keras's own")
                table.add_row(
                    model,
                    name,
                    f"{step * 1e3:.3f}",
                    f"{WORKLOADS[model].batch / step:,.0f}",
                    f"{ratio(values, figures['plain']):.2f}",
                    f"{ratio(values, own):.2f}" if own else "—",
                )
        console.print(table)


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1] == "--child":
        serve(lambda: _fit_function(*sys.argv[2:]))
    else:
        main()
