"""What a worker of ``kerasdist bench`` runs.

    python -m kerasdist.checks.bench_worker BATCH STEPS
    python -m kerasdist.checks.bench_worker --cores CORES COMMAND...

The first trains the model for which no script is given. The second runs a command on the worker's
part of the machine's cores: one worker alone would compute on all cores, and two would share them,
so that nothing would scale.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from kerasdist.cluster.kerasdist_variables import LOCAL_RANK

EPOCHS = 3
_CPU, _ACCELERATOR = (512, 4), (4096, 8)


def train(batch_per_replica: int, steps: int) -> None:
    """Trains a network of dense layers; `kerasdist.training.fit_meter` measures."""
    import keras  # the command on its part of the cores chooses the backend itself
    import numpy as np

    from kerasdist.strategies.auto import auto

    strategy = auto()
    is_cpu = strategy.extended.worker_devices[0].startswith("cpu")
    width, depth = _CPU if is_cpu else _ACCELERATOR
    with strategy.scope():
        hidden = [keras.layers.Dense(width, activation="relu") for _ in range(depth)]
        model = keras.Sequential([keras.Input((width,)), *hidden, keras.layers.Dense(1)])
        model.compile(optimizer="adam", loss="mse")
    batch = batch_per_replica * strategy.num_replicas_in_sync
    x = np.random.default_rng(0).normal(size=(batch * steps, width)).astype("float32")
    model.fit(x, x[:, :1], batch_size=batch, epochs=EPOCHS, shuffle=False, verbose=0)


def run_on(size: int, command: Sequence[str]) -> None:
    """Replaces this process by a command that computes on so many cores."""
    first = int(os.environ[LOCAL_RANK]) * size
    cores = sorted(os.sched_getaffinity(0))[first : first + size]
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    os.execvp(command[0], command)


if __name__ == "__main__":
    if sys.argv[1] == "--cores":
        run_on(int(sys.argv[2]), sys.argv[3:])
    else:
        train(int(sys.argv[1]), int(sys.argv[2]))
