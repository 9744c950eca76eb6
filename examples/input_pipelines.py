"""Feed one model from five kinds of data sources, then from files that workers share.

The data are 8,192 patches of scikit-learn's two photographs, a temple and a flower; the model says
from which photograph a patch is. Under a strategy, any source yields global batches, and each
device gets its rows. By default each worker reads all batches. With `AutoShardPolicy.FILE` it reads
only some of the files, which helps if reading is slow.

    KERAS_BACKEND=torch python examples/input_pipelines.py

Each kind works on every backend; kinds whose package is not installed are left out.
"""

import argparse
import math
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_sample_images

import kerasdist as kd

BATCH_SIZE, SIDE = 256, 16


def write_patches(folder: Path, count: int) -> None:
    """Write patches as an array, and as four files of records: the label, then the pixels."""
    random = np.random.default_rng(0)  # every worker writes the same
    photographs = load_sample_images().images
    labels = random.integers(0, 2, count).astype("uint8")
    corners = random.integers(0, 400, (count, 2))
    places = zip(labels, *corners.T, strict=True)
    patches = np.stack([photographs[i][j : j + SIDE, k : k + SIDE] for i, j, k in places])
    np.save(folder / "patches.npy", patches)
    np.save(folder / "labels.npy", labels)
    records = np.concatenate([labels[:, np.newaxis], patches.reshape(count, -1)], axis=1)
    for number, part in enumerate(np.split(records, 4)):
        part.tofile(folder / f"part-{number}.bin")


class Batches(keras.utils.PyDataset):
    """Keras's own kind: it yields a batch by its number."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        super().__init__()
        self.x, self.y = x, y

    def __len__(self) -> int:
        return math.ceil(len(self.y) / BATCH_SIZE)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(index * BATCH_SIZE, (index + 1) * BATCH_SIZE)
        return self.x[rows], self.y[rows]


def sources(x: np.ndarray, y: np.ndarray, folder: Path, strategy: kd.Strategy) -> dict[str, Any]:
    """Return the arguments of `fit`, by name."""
    arrays = {"x": x, "y": y, "batch_size": BATCH_SIZE}
    found: dict[str, Any] = {"arrays in a file": arrays, "PyDataset": {"x": Batches(x, y)}}
    pairs = list(zip(x, y, strict=True))  # the rows stay in the file until they are read
    if find_spec("torch"):
        from torch.utils.data import DataLoader

        found["DataLoader"] = {"x": DataLoader(pairs, BATCH_SIZE)}
    if find_spec("grain"):
        import grain

        batches = grain.MapDataset.source(pairs).batch(BATCH_SIZE)
        found["Grain"] = {"x": batches.to_iter_dataset()}
    if find_spec("tensorflow"):
        import tensorflow as tf

        def parse(record: Any) -> tuple[Any, Any]:
            record = tf.io.decode_raw(record, tf.uint8)
            return tf.reshape(record[:, 1:], (-1, SIDE, SIDE, 3)), record[:, 0]

        files = sorted(str(path) for path in folder.glob("part-*.bin"))
        records = tf.data.FixedLengthRecordDataset(files, 1 + 3 * SIDE**2).batch(BATCH_SIZE)
        dataset = records.map(parse).prefetch(2)
        options = kd.InputOptions(auto_shard_policy=kd.AutoShardPolicy.FILE)
        found["tf.data"] = {"x": dataset}
        found["tf.data, by file"] = {"x": strategy.distribute_dataset(dataset, options)}
    return found


def draw(path: str, speeds: dict[str, float]) -> None:
    """Draw a bar for each source."""
    import matplotlib.pyplot as plt

    plt.figure(figsize=(6.4, 4), layout="constrained")
    bars = plt.barh(list(speeds), list(speeds.values()))
    plt.bar_label(bars, fmt="{:,.0f}", padding=3)
    plt.margins(x=0.15)
    plt.xlabel("examples/s")
    plt.xticks([])
    plt.gca().invert_yaxis()
    plt.savefig(path)


def main() -> None:
    """Train for an epoch on each source, and print how fast it was."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--patches", type=int, default=8192)
    parser.add_argument("--figure", help="a PNG file to write")
    options = parser.parse_args()
    count = options.patches
    if kd.cluster.detect() is None:  # not a worker of a job
        kd.config.set_logical_cpu_devices(2)  # used where there is no accelerator
    strategy = kd.auto()
    with strategy.scope():
        model = keras.Sequential([keras.Input((SIDE, SIDE, 3)), layers.Rescaling(1 / 255)])
        model.add(layers.Conv2D(16, 3, strides=2, activation="relu"))
        model.add(layers.GlobalAveragePooling2D())
        model.add(layers.Dense(1, activation="sigmoid"))
        model.compile(keras.optimizers.Adam(1e-2), "binary_crossentropy", metrics=["accuracy"])
    with tempfile.TemporaryDirectory() as name:
        write_patches(Path(name), count)
        x = np.load(Path(name, "patches.npy"), mmap_mode="r")
        y = np.load(Path(name, "labels.npy"))
        model.fit(x, y, batch_size=BATCH_SIZE, verbose=0)  # compiles
        speeds = {}
        for source, data in sources(x, y, Path(name), strategy).items():
            start = time.perf_counter()
            history = model.fit(**data, shuffle=False, verbose=0).history
            speed = speeds[source] = count / (time.perf_counter() - start)
            print(f"{source:>16}: {speed:6.0f} examples/s, accuracy {history['accuracy'][-1]:.4f}")
    if options.figure:
        draw(options.figure, speeds)
    accuracy = history["accuracy"][-1]
    print(f"{strategy.num_replicas_in_sync} replicas: accuracy {accuracy:.4f} at the end")


if __name__ == "__main__":
    main()
