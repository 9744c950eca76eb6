"""A worker that trains up to an epoch with backups in a folder, and prints a digest of its state.

Arguments: the folder, the value of `sharding=` (``none`` for None), the number of epochs.
"""

import hashlib
import os
import sys

import numpy as np

import kerasdist as kd

folder, sharding, epochs = sys.argv[1:]
if "KERASDIST_WORKERS" in os.environ:
    sharded = None if sharding == "none" else kd.Sharding(sharding, min_size=1)
    strategy = kd.MultiWorkerMirroredStrategy(devices=["cpu:0"], sharding=sharded)
else:
    strategy = kd.OneDeviceStrategy("cpu:0")

import keras  # noqa: E402

from tests.conformance.cases_sharding import even  # noqa: E402
from tests.conformance.models import regression  # noqa: E402

keras.utils.set_random_seed(3)
with strategy.scope():
    model = even()
x, y = regression(12, outputs=4)
keras.utils.set_random_seed(4)
seen = []
watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
backup = kd.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
model.fit(x, y, batch_size=4, epochs=int(epochs), verbose=0, callbacks=[backup, watch])
digest = hashlib.sha256()
for variable in [*model.weights, *model.optimizer.variables]:
    digest.update(np.array(keras.ops.convert_to_numpy(variable)).tobytes())
if strategy.is_chief:
    print(f"{len(seen)} batches, state {digest.hexdigest()}")
