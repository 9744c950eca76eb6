"""How long training stands still for a checkpoint: Keras's ModelCheckpoint, and `save="async"`.

    KERAS_BACKEND=torch python benchmarks/checkpoints.py [--units 2048] [--epochs 8]

Three Dense layers, 50 MB of weights, and Adam's two slots of each: a file of 151 MB after each
epoch. Medians of the epochs but for the first. A line also says how long a step takes while a
thread writes, and otherwise, and how large the process was at its peak.
"""

import argparse
import resource
import statistics
import tempfile
import time
from pathlib import Path

import keras
import numpy as np

import kerasdist as kd

ROW = "{:12} {:>16} {:>12} {:>16} {:>14} {:>12}"


class Timed(keras.callbacks.Callback):
    """Times a checkpoint's part of each epoch's end, and each step."""

    def __init__(self, checkpoint):
        super().__init__()
        self._checkpoint = checkpoint
        self.stops, self.writing, self.others = [], [], []

    def set_model(self, model):
        super().set_model(model)
        self._checkpoint.set_model(model)

    def on_train_begin(self, logs=None):
        self._checkpoint.on_train_begin(logs)

    def on_epoch_begin(self, epoch, logs=None):
        self._checkpoint.on_epoch_begin(epoch, logs)

    def on_train_batch_begin(self, batch, logs=None):
        self._begin = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        file = getattr(self._checkpoint, "_file", None)
        busy = file is not None and file._writing is not None and not file._writing.done()
        (self.writing if busy else self.others).append(time.perf_counter() - self._begin)

    def on_epoch_end(self, epoch, logs=None):
        begin = time.perf_counter()
        self._checkpoint.on_epoch_end(epoch, logs)
        self.stops.append(time.perf_counter() - begin)

    def on_train_end(self, logs=None):
        self._checkpoint.on_train_end(logs)


def timed(model, x, epochs, folder, kind, **options):
    callback = Timed(kind(folder / "m.keras", **options))
    model.fit(x, x, batch_size=32, epochs=epochs, verbose=0, callbacks=[callback])
    return callback


def milliseconds(times):
    return f"{1000 * statistics.median(times):.0f} ms" if times else "-"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    kd.config.set_logical_cpu_devices(2)
    with kd.MirroredStrategy().scope():
        layers = [keras.layers.Dense(options.units) for _ in range(3)]
        model = keras.Sequential([keras.Input((options.units,)), *layers])
        model.compile("adam", "mse")
    x = np.ones((32 * options.steps, options.units), "float32")
    model.fit(x, x, batch_size=32, verbose=0)
    print(keras.backend.backend())
    print(ROW.format("", "stands still", "longest", "step, writing", "step, else", "peak"))
    with tempfile.TemporaryDirectory() as folder:
        for name, kind, arguments in (
            ("Keras's", keras.callbacks.ModelCheckpoint, {}),
            ("async", kd.callbacks.ModelCheckpoint, {"save": "async"}),
        ):
            found = timed(model, x, options.epochs, Path(folder), kind, **arguments)
            stops = found.stops[1:]
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            cells = milliseconds(stops), milliseconds([max(stops)])
            cells += milliseconds(found.writing), milliseconds(found.others), f"{peak:.0f} MB"
            print(ROW.format(name, *cells), flush=True)


if __name__ == "__main__":
    main()
