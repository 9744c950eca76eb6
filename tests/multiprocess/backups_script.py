"""A worker that trains up to an epoch with backups in a folder, and prints a digest of its state.

Arguments: the folder, the value of `sharding=` (``none`` for None), the number of epochs. With a
fourth one, a width, layers are so wide, and it prints how much memory the backups took at most.
"""

import hashlib
import os
import sys
import tracemalloc

import numpy as np

import kerasdist as kd

folder, sharding, epochs, *width = sys.argv[1:]
if "KERASDIST_WORKERS" in os.environ:
    sharded = None if sharding == "none" else kd.Sharding(sharding, min_size=1)
    strategy = kd.MultiWorkerMirroredStrategy(devices=["cpu:0"], sharding=sharded)
else:
    strategy = kd.OneDeviceStrategy("cpu:0")

import keras  # noqa: E402

from tests.conformance.cases_sharding import even  # noqa: E402
from tests.conformance.models import regression, stack  # noqa: E402


def wide():
    layers = [keras.layers.Dense(int(width[0]), use_bias=False) for _ in range(4)]
    return stack([*layers, keras.layers.Dense(4)], keras.optimizers.Adam(0.01))


def measured(function):
    def run(*args, **kwargs):
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        try:
            return function(*args, **kwargs)
        finally:
            taken = tracemalloc.get_traced_memory()[1] - before
            print(f"{function.__name__} took {taken}", flush=True)

    return run


keras.utils.set_random_seed(3)
with strategy.scope():
    model = wide() if width else even()
x, y = regression(12, outputs=4)
keras.utils.set_random_seed(4)
seen = []
watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
backup = kd.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
if width:
    tracemalloc.start()
    backup.save, backup.on_train_begin = measured(backup.save), measured(backup.on_train_begin)
model.fit(x, y, batch_size=4, epochs=int(epochs), verbose=0, callbacks=[backup, watch])
digest = hashlib.sha256()
for variable in [*model.weights, *model.optimizer.variables]:
    digest.update(np.array(keras.ops.convert_to_numpy(variable)).tobytes())
if strategy.is_chief:
    print(f"{len(seen)} batches, state {digest.hexdigest()}", flush=True)
if width:
    from kerasdist.job.job import current_job

    current_job().leave()
    # The end of the interpreter would stop tracing: before 3.12, while other threads allocate, that
    # may crash (python/cpython#128679).
    os._exit(0)
