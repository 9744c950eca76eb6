"""A worker that writes and reads backups, and prints how much memory that took at most.

Arguments: a folder, values of `sharding=`. Python once starts to trace memory and never stops:
before 3.12, to stop while other threads allocate may crash (python/cpython#128679).
"""

import os
import sys
import tracemalloc
from pathlib import Path

import kerasdist as kd

folder, *shardings = sys.argv[1:]
WIDTH = 512


def strategy(sharding):
    sharded = kd.Sharding(sharding, min_size=1)
    return kd.MultiWorkerMirroredStrategy(devices=["cpu:0"], sharding=sharded)


strategy(shardings[0])  # before the framework starts

import keras  # noqa: E402
import numpy as np  # noqa: E402

from kerasdist.job.job import current_job  # noqa: E402
from tests.conformance.lab import optimizer_values, values  # noqa: E402
from tests.conformance.models import regression  # noqa: E402


def trained(sharding, backup):
    keras.utils.set_random_seed(3)
    with strategy(sharding).scope():
        layers = [keras.layers.Dense(WIDTH, use_bias=False) for _ in range(4)]
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(4)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
    x, y = regression(12, outputs=4)
    keras.utils.set_random_seed(4)
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[backup])
    return [*values(model.weights), *optimizer_values(model)]


def measured(function, peaks):
    def run(*args, **kwargs):
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        try:
            return function(*args, **kwargs)
        finally:
            peaks.append(tracemalloc.get_traced_memory()[1] - before)

    return run


tracemalloc.start()
for sharding in shardings:
    place = Path(folder, sharding)
    writing, reading = [], []
    backup = kd.callbacks.BackupAndRestore(place, save_freq=2, delete_checkpoint=False)
    backup.save = measured(backup.save, writing)
    expected = trained(sharding, backup)
    current_job().all_gather_object("written", None)
    again = kd.callbacks.BackupAndRestore(place, save_freq=2, delete_checkpoint=False)
    again.on_train_begin = measured(again.on_train_begin, reading)
    restored = trained(sharding, again)
    assert all(map(np.array_equal, restored, expected)), "another state"
    sizes = f"writing {' '.join(map(str, writing))}, reading {' '.join(map(str, reading))}"
    print(f"{sharding}: largest {4 * WIDTH * WIDTH}, {sizes}", flush=True)
current_job().leave()
os._exit(0)  # the end of the interpreter would stop tracing
