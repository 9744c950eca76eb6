"""What `kd.callbacks.Telemetry` adds to a step of `fit`, as the difference of two.

    python benchmarks/telemetry_overhead.py [--backends jax torch] [--rounds 20]

One process a backend trains one model, on two replicas: with the callback and without, in turns,
each round in the other order. Compared are the clock's time, the processor time of all threads,
and that of the thread that runs `fit`, where the callback does its work and others disturb least:
medians over the rounds, and the interval that has the median in 95 of 100 such runs. Its width is
what the machine's noise allows to say.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
import timeit

import numpy as np
from networks import TASKS

BACKENDS = ("tensorflow", "jax", "torch")
TASK = TASKS["mlp"]  # whose step takes some milliseconds
CLOCKS = {
    "time": time.perf_counter,
    "processor time": time.process_time,
    "processor time of the thread": time.thread_time,
}


def child(rounds: int) -> None:
    """Prints the differences on this process's backend, and what a step's bookkeeping takes."""
    import kerasdist as kd

    kd.config.set_logical_cpu_devices(2)
    x, y = TASK.data()
    with kd.MirroredStrategy().scope():
        model = TASK.model()
        model.compile("adam", TASK.loss())

    def seconds(callbacks) -> list[float]:
        begin = [clock() for clock in CLOCKS.values()]
        model.fit(x, y, TASK.batch, shuffle=False, verbose=0, callbacks=callbacks)
        return [clock() - one for clock, one in zip(CLOCKS.values(), begin, strict=True)]

    taken = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1 + rounds):
            for measured in (number % 2 == 0, number % 2 == 1):
                one = seconds([kd.callbacks.Telemetry(folder)] if measured else [])
                if number:  # the first round compiles
                    taken[measured].append(one)
    ours, alone = (1e3 * np.array(taken[which]) / TASK.steps for which in (True, False))
    step = np.median(alone[:, 0])
    print(f"{os.environ['KERAS_BACKEND']}: a step takes {step:.2f} ms; with telemetry")
    for name, more, without in zip(CLOCKS, (ours - alone).T, alone.T, strict=True):
        low, high = (100 * one / step for one in interval(more))
        median = np.median(more)
        print(
            f"  {name}: {np.median(without):.3f} ms a step and {1e3 * median:.1f} µs more: "
            f"{100 * median / step:.2f} % of a step ({low:.2f} to {high:.2f})"
        )
    print(f"  bookkeeping by itself: {1e6 * bookkeeping():.1f} µs a step")


def interval(values: np.ndarray) -> tuple[float, float]:
    """Returns the values between which the median lies, with a confidence of 95 %."""
    ordered = np.sort(values)
    low = max(math.floor(len(ordered) / 2 - 0.98 * math.sqrt(len(ordered))), 0)
    return ordered[low], ordered[-1 - low]


def bookkeeping() -> float:
    """Returns the processor time of what the meter does in a step, at its best."""
    from kerasdist.backends.base.metering import Meter

    meter = Meter(knows_collectives=True, steps_ahead=1)
    for _ in range(2):  # as many as Telemetry has
        meter.window(math.inf, print)
    runs = timeit.repeat(lambda: meter.done(1, 8), number=2000, repeat=9, timer=time.process_time)
    return min(runs) / 2000


def main() -> int:
    """Measures each backend in a process of its own; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    status = 0
    for backend in options.backends:
        variables = {"KERAS_BACKEND": backend, "CUDA_VISIBLE_DEVICES": ""}
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"}
        command = [sys.executable, __file__, "--child", str(options.rounds)]
        environment = {**quiet, **os.environ, **variables}
        status |= subprocess.run(command, env=environment, check=False).returncode
    return status


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(int(sys.argv[2]))
    else:
        sys.exit(main())
