"""Train on several devices, then serve where kerasdist is not installed.

A saved model contains no trace of the strategy. The script trains on scikit-learn's wine data and
saves the model. Then it starts another Python process, in which kerasdist cannot be imported. This
process loads the file with plain Keras, on one device, and the script compares the predictions.

    KERAS_BACKEND=torch python examples/train_then_serve.py
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_wine

import kerasdist as kd

SERVER = """
import sys
sys.modules["kerasdist"] = None  # as if it were not installed
import keras
import numpy as np

model = keras.saving.load_model(sys.argv[1])
np.save(sys.argv[3], model.predict(np.load(sys.argv[2]), verbose=0))
"""


def draw(path: str, predictions: np.ndarray, served: np.ndarray) -> None:
    """Draw the probabilities that the server answers over those of the training script."""
    import matplotlib.pyplot as plt

    plt.figure(figsize=(6.4, 4), layout="constrained")
    plt.plot([0, 1], [0, 1], color="lightgrey")
    for kind, (here, there) in enumerate(zip(predictions.T, served.T, strict=True)):
        plt.plot(here, there, "o", label=f"wine {kind}", alpha=0.6)
    plt.xlabel("probability where it was trained, with kerasdist")
    plt.ylabel("where it is served, without")
    plt.legend()
    plt.savefig(path)


def main() -> None:
    """Train, save, let a server predict, and print how its predictions differ."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--figure", help="a PNG file to write")
    options = parser.parse_args()

    if kd.cluster.detect() is None:  # not a worker of a job
        kd.config.set_logical_cpu_devices(2)  # used where there is no accelerator
    strategy = kd.auto()
    keras.utils.set_random_seed(0)
    wine = load_wine()
    order = np.random.default_rng(0).permutation(len(wine.target))
    x, y = wine.data[order].astype("float32"), wine.target[order].astype("int32")
    scale = layers.Normalization(mean=x[:120].mean(axis=0), variance=x[:120].var(axis=0))
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((13,)),
                scale,  # part of the model, so that the server gets raw numbers
                layers.Dense(32),
                layers.BatchNormalization(),
                layers.Activation("relu"),
                layers.Dense(3, activation="softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x[:120], y[:120], batch_size=16, epochs=options.epochs, verbose=2)
    _, accuracy = model.evaluate(x[120:], y[120:], verbose=0)
    predictions = model.predict(x[120:], verbose=0)

    with tempfile.TemporaryDirectory() as folder:  # each worker's own, so that each of them saves
        names = [str(Path(folder, name)) for name in ("model.keras", "rows.npy", "answer.npy")]
        model.save(names[0])
        np.save(names[1], x[120:])
        subprocess.run([sys.executable, "-c", SERVER, *names], check=True)
        served = np.load(names[2])
    difference = np.max(np.abs(served - predictions))
    if options.figure:
        draw(options.figure, predictions, served)
    print(
        f"{strategy.num_replicas_in_sync} replicas: test accuracy {accuracy:.4f}, "
        f"difference of the served predictions {difference:.1e}"
    )


if __name__ == "__main__":
    main()
