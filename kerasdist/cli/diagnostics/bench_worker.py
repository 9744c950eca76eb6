"""A worker of ``kerasdist bench``: trains a model, or runs a command on a few cores.

    python -m kerasdist.cli.diagnostics.bench_worker [CORES COMMAND...]

If the number of cores were not limited, one worker would use all cores. Two workers would share the
same cores, so the benchmark would show no speed-up.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

from kerasdist.cluster.kerasdist_variables import LOCAL_RANK

EPOCHS, STEPS, BATCH_PER_REPLICA = 3, 20, 256
_CPU, _ACCELERATOR = (512, 4), (4096, 8)


def run_on_own_cores(size: int, command: list[str]) -> NoReturn:
    """Replaces this process by a command on `size` cores, which no other worker uses."""
    first = int(os.environ[LOCAL_RANK]) * size
    cores = sorted(os.sched_getaffinity(0))[first : first + size]
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    os.execvp(command[0], command)


def train() -> None:
    """Trains a network of dense layers; `kerasdist.callbacks.telemetry.Bench` measures it."""
    import keras  # imported here, because `run_on_own_cores` does not need Keras
    import numpy as np

    from kerasdist.strategies.mirrored import auto

    strategy = auto()
    is_cpu = strategy.extended.worker_devices[0].startswith("cpu")
    width, depth = _CPU if is_cpu else _ACCELERATOR
    with strategy.scope():
        hidden = [keras.layers.Dense(width, activation="relu") for _ in range(depth)]
        model: Any = keras.Sequential([keras.Input((width,)), *hidden, keras.layers.Dense(1)])
        model.compile(optimizer="adam", loss="mse")
    batch = BATCH_PER_REPLICA * strategy.num_replicas_in_sync
    x = np.random.default_rng(0).normal(size=(batch * STEPS, width)).astype("float32")
    model.fit(x, x[:, :1], batch_size=batch, epochs=EPOCHS, shuffle=False, verbose=0)


if __name__ == "__main__":
    if sys.argv[1:]:
        run_on_own_cores(int(sys.argv[1]), sys.argv[2:])
    train()
