"""A worker that trains a little under a launcher that watches it; worker 1 is the slow one.

kerasdist run --workers 2 -m tests.multiprocess.watched_script [SECONDS [TELEMETRY [BACKUPS]]]

With a folder for backups it trains for longer.
"""

import math
import os
import sys
import time

import numpy as np

ROWS, BATCH, EPOCHS, LONG = 43, 8, 2, 50  # six steps an epoch


def main():
    import keras  # after the launcher's variables

    import kerasdist as kd

    slow = float(sys.argv[1]) if os.environ.get("KERASDIST_RANK") == "1" else 0.0

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return math.ceil(ROWS / BATCH)

        def __getitem__(self, index):
            time.sleep(slow)
            rows = np.arange(ROWS, dtype="float32")[index * BATCH :][:BATCH, None]
            return rows / ROWS, rows

    strategy = kd.MultiWorkerMirroredStrategy(devices=["cpu:0"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    telemetry, backups = [*sys.argv[2:], "", ""][:2]
    callbacks = [kd.callbacks.Telemetry(telemetry, every=0.1)] if telemetry else []
    callbacks += [kd.callbacks.BackupAndRestore(backups, save_freq=3)] if backups else []
    epochs = LONG if backups else EPOCHS
    model.fit(Batches(), epochs=epochs, verbose=0, callbacks=callbacks)
    sys.stdout.write(f"trained on {strategy.num_replicas_in_sync} replicas\n")


if __name__ == "__main__":
    main()
