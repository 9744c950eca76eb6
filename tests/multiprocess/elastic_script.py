"""Trains on data of several kinds, one after another, and makes the job change its size meanwhile.

python -m tests.multiprocess.elastic_script FOLDER SHARDING KIND...

In each call of `fit` the size changes once, in the middle of an epoch: `CHANGES` says to how many
workers. A host is lost as all that runs on it is killed and ssh no longer reaches it; see
`tests.multiprocess.hosts`. Without a launcher it trains on one device, undisturbed. The chief
writes what each `fit` ended with to FOLDER, where the lines of its CSVLogger are as well.

SHARDING: none, full, or passes, with which workers compute at most `MOST` rows at once: fewer than
two of them have, and no fewer than three have.
"""

import json
import math
import os
import sys
import time
from pathlib import Path

import numpy as np

import kerasdist as kd
from tests.conformance.double import double_precision
from tests.multiprocess import hosts

FOLDER, SHARDING = Path(sys.argv[1]), sys.argv[2]
KINDS = sys.argv[3:]
# How many workers the job has after the change in the first call of `fit`, the second, ...
BEGIN, CHANGES = 3, (2, 4, 1)
ROWS, BATCH, EPOCHS = 47, 10, 3
MOST = 4
WORKERS = int(os.environ.get("KERASDIST_WORKERS", "0"))
RANK = int(os.environ.get("KERASDIST_RANK", "0"))

if WORKERS:
    sharded = None if SHARDING in ("none", "passes") else kd.Sharding(SHARDING, min_size=1)
    strategy = kd.MultiWorkerMirroredStrategy(devices=["cpu:0"], sharding=sharded)
    if SHARDING == "passes":
        kd.config.set_most_examples_at_once(MOST)
    hosts.say_where(FOLDER)
else:
    strategy = kd.OneDeviceStrategy("cpu:0")

import keras  # noqa: E402


def rows():
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 4))
    return x, np.sin(x[:, :1]) + 0.1 * random.normal(size=(ROWS, 1))


class Rows(keras.utils.PyDataset):
    """Shuffles its rows at the end of each epoch, with a generator of its own."""

    def __init__(self):
        super().__init__()
        self.x, self.y = rows()
        self.random = np.random.default_rng(8)
        self.order = np.arange(ROWS)

    def __len__(self):
        return math.ceil(ROWS / BATCH)

    def __getitem__(self, index):
        own = self.order[index * BATCH : (index + 1) * BATCH]
        return self.x[own], self.y[own]

    def on_epoch_end(self):
        self.random.shuffle(self.order)


def data(kind):
    x, y = rows()
    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": BATCH}
    if kind == "pydataset":
        return {"x": Rows()}
    if kind == "loader":
        import torch

        pairs = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
        order = torch.Generator().manual_seed(3)
        return {"x": torch.utils.data.DataLoader(pairs, BATCH, shuffle=True, generator=order)}
    import tensorflow as tf

    return {"x": tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=5).batch(BATCH)}


class AtMost(keras.layers.Layer):
    """Raises an error where a worker's layers get more rows than they shall."""

    def call(self, x):
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            few = tf.debugging.assert_less_equal(tf.shape(x)[0], MOST if WORKERS else BATCH)
            with tf.control_dependencies([] if few is None else [few]):
                return tf.identity(x)
        # On JAX Keras traces the whole batch, too, to find shapes; conformance looks there.
        if WORKERS and keras.backend.backend() == "torch" and not x.is_meta and len(x) > MOST:
            raise ValueError(f"{len(x)} rows, and {MOST} at most")
        return x


class Change(keras.callbacks.Callback):
    """Changes the size of the job, if it does not have the size of this call's end."""

    def __init__(self, number):
        super().__init__()
        self.before = (BEGIN, *CHANGES)[number]
        self.after = CHANGES[number]
        self.epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if self.before == WORKERS and (self.epoch, batch) >= (1, 1):
            if self.after > self.before:
                hosts.bring_back(FOLDER)
                time.sleep(1.5)  # or training would end before the launcher has asked them
            elif batch == 3 and RANK == 1:
                hosts.lose(FOLDER, self.before - self.after)


def main():
    print(f"attempt {os.environ.get('KERASDIST_RESTART')} of {WORKERS} workers", flush=True)
    for number, kind in enumerate(KINDS):
        keras.utils.set_random_seed(3)
        if kind == "loader":
            import torch

            torch.manual_seed(3)
        draws = keras.backend.backend() == "jax" and SHARDING != "passes"
        with strategy.scope():
            other = AtMost if SHARDING == "passes" else keras.layers.BatchNormalization
            layers = [keras.layers.Dense(8, "tanh"), other()]
            layers += [keras.layers.Dropout(0.2, seed=1)] * draws
            model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
            rmse = keras.metrics.RootMeanSquaredError()
            model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae", rmse])
        seen = []
        note = keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs, seen=seen: seen.append(batch)
        )
        name = f"{number}-{kind}"
        backup = kd.callbacks.BackupAndRestore(FOLDER / f"{name}-backups", save_freq=2)
        log = keras.callbacks.CSVLogger(FOLDER / f"{name}.csv", append=True)
        callbacks = [backup, log, note, *([Change(number)] if WORKERS else [])]
        epochs = EPOCHS + 3 * (CHANGES[number] == max(CHANGES))
        fit = model.fit(**data(kind), epochs=epochs, verbose=0, callbacks=callbacks)
        print(f"{name}: {len(seen)} of {5 * epochs} batches, from {seen[:1]}", flush=True)
        values = [keras.ops.convert_to_numpy(one) for one in (*model.weights,)]
        values += [keras.ops.convert_to_numpy(one) for one in model.optimizer.variables]
        if strategy.is_chief:
            np.savez(FOLDER / f"{name}.npz", *values)
            (FOLDER / f"{name}.json").write_text(json.dumps(fit.history))


if __name__ == "__main__":
    with double_precision(keras.backend.backend()):
        main()
