"""One script for plain Keras, for Keras's own data parallelism on torch, and for kerasdist.

python two_processes.py {alone,keras,kerasdist} CASE
"""

import contextlib
import json
import os
import signal
import sys
import time

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch

TOOL, CASE = sys.argv[1:]
ROWS = 4  # of a global batch


def distribute():
    if TOOL == "kerasdist":
        import kerasdist as kd

        return kd.MultiWorkerMirroredStrategy().scope()
    if TOOL == "keras":
        keras.distribution.initialize()
        # `False`, as a process of `batch_size` has rows of its own: see there.
        parallel = keras.distribution.DataParallel(auto_shard_dataset=CASE != "batch_size")
        keras.distribution.set_distribution(parallel)
    return contextlib.nullcontext()


class Batches(keras.utils.PyDataset):
    """Keras gives each process every other batch of this; kerasdist half of the rows of each."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y
        self.rows = ROWS // 2 if TOOL == "keras" else ROWS

    def __len__(self):
        return (len(self.x) + self.rows - 1) // self.rows

    def __getitem__(self, index):
        chosen = slice(index * self.rows, (index + 1) * self.rows)
        return self.x[chosen], self.y[chosen]


class Largest(keras.metrics.Metric):
    """A metric whose state is no sum."""

    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_true)))

    def result(self):
        return keras.ops.convert_to_tensor(self.value)


class OwnStep(keras.Model):
    """As written for one device: it calls `self`."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = keras.ops.mean(keras.ops.square(self(x, training=True) - y))
        loss.backward()
        gradients = [weight.value.grad for weight in self.trainable_weights]
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


class Seen(keras.callbacks.Callback):
    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if CASE == "killed" and TOOL != "alone" and self.steps == 2 and RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def linear():
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    return keras.Sequential([keras.Input((1,)), dense])


def data(rows):
    x = np.ones((rows, 1), "float32")
    return x, np.arange(1, rows + 1, dtype="float32")[:, None]


def trained(model, x, y, metrics=(), epochs=1):
    seen = Seen()
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[*metrics])
    fit = model.fit(
        Batches(x, y), epochs=epochs, shuffle=False, verbose=0, callbacks=[seen]
    ).history
    return seen.steps, {name: round(float(values[-1]), 4) for name, values in fit.items()}


def weights(model):
    return [round(float(each), 4) for one in model.get_weights() for each in np.ravel(one)]


def ragged():
    model = linear()
    trained(model, *data(7))
    return weights(model)


def uneven():
    model = linear()
    steps, _ = trained(model, *data(10))
    return [steps, *weights(model)]


def own_step():
    model = OwnStep()
    model.build((None, 1))
    trained(model, *data(8))
    return weights(model)


def batch_norm():
    model = keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization(momentum=0.0)])
    x = np.array([[0], [0], [10], [10]], "float32")
    trained(model, x, x)
    return [round(float(one), 4) for one in np.ravel(model.layers[0].moving_mean.numpy())]


def metric():
    return trained(linear(), *data(8), metrics=[Largest()])[1]["largest"]


def predict():
    model = linear()
    model.layers[0].set_weights([np.ones((1, 1), "float32")])
    x = np.arange(6, dtype="float32")[:, None]
    model.compile()
    return np.ravel(model.predict(Batches(x, x), verbose=0)).tolist()


def arrays(rows=slice(None)):
    model = linear()
    x, y = (one[rows] for one in data(8))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    seen = Seen()
    model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0, callbacks=[seen])
    return [seen.steps, *weights(model)]


def batch_size():
    """Keras takes arrays if each process has its own rows."""
    return arrays(slice(RANK, None, 2) if TOOL == "keras" else slice(None))


def even():
    model = linear()
    steps, logs = trained(model, *data(8), metrics=["mae"])
    return [steps, *weights(model), logs["mae"]]


def killed():
    trained(linear(), *data(400))
    return "ended"


def speed():
    """Milliseconds a step of 128 rows, after the first epoch."""
    layers = [keras.layers.Dense(512, activation="relu") for _ in range(4)]
    model = keras.Sequential([keras.Input((512,)), *layers, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    rng = np.random.default_rng(0)
    rows = 128 * 40
    batches = Batches(rng.normal(size=(rows, 512)).astype("float32"), np.ones((rows, 1), "float32"))
    batches.rows = 64 if TOOL == "keras" else 128
    model.fit(batches, verbose=0)
    began = time.perf_counter()
    model.fit(batches, epochs=2, verbose=0)
    return round((time.perf_counter() - began) / 80 * 1000, 1)


RANK = int(os.environ.get("RANK", "0"))
with distribute():
    found = globals()[CASE]()
print(json.dumps({"rank": RANK, "found": found}), flush=True)
if TOOL == "keras":
    torch.distributed.destroy_process_group()  # else a process may abort at its end
