"""Classify images on several devices.

A small convolutional network on scikit-learn's handwritten digits: 1,797 images of 8 x 8 pixels,
which come with the package. Four lines differ from a script for one device: the import, the CPU
devices, the strategy and the scope. Choose the backend as always in Keras:

    KERAS_BACKEND=jax python examples/digits_cnn.py
"""

import argparse
import time

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import kerasdist as kd

BATCH_SIZE = 32  # the global batch: all devices together
EPOCHS = 12


def load_data() -> tuple[np.ndarray, ...]:
    """Return x_train, x_test, y_train, y_test; images are 8 x 8 x 1 in [0, 1]."""
    digits = load_digits()
    images = (digits.images[..., np.newaxis] / 16.0).astype("float32")
    labels = digits.target.astype("int32")
    parts = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    return tuple(np.asarray(part) for part in parts)


def build_model(steps: int) -> keras.Model:
    """Return the compiled classifier; its learning rate falls to zero after `steps`."""

    def convolution(filters: int) -> list[keras.Layer]:
        return [
            layers.Conv2D(filters, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.Activation("gelu"),
        ]

    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            *convolution(32),
            *convolution(32),
            layers.AveragePooling2D(2),
            *convolution(64),
            layers.Flatten(),
            layers.Dense(10, activation="softmax"),
        ]
    )
    schedule = keras.optimizers.schedules.CosineDecay(0.03, decay_steps=steps)
    model.compile(
        optimizer=keras.optimizers.SGD(schedule, momentum=0.9),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def draw(path: str, labels: np.ndarray, predicted: np.ndarray) -> None:
    """Draw how often each digit was taken for which."""
    import matplotlib.pyplot as plt
    from sklearn.metrics import ConfusionMatrixDisplay

    _, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    ConfusionMatrixDisplay.from_predictions(
        *(labels, predicted), cmap="Blues", ax=axes, colorbar=False
    )
    axes.set_aspect("auto")
    plt.savefig(path)


def main() -> None:
    """Train on all devices, and print the accuracy on the test set."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--figure", help="a PNG file to write")
    options = parser.parse_args()
    epochs = options.epochs

    # First, because a backend counts its CPU devices when it starts. They are used where there is
    # no accelerator; in a job, `kerasdist run` says how many devices a worker has.
    if kd.cluster.detect() is None:
        kd.config.set_logical_cpu_devices(2)
    strategy = kd.auto()

    keras.utils.set_random_seed(0)
    x_train, x_test, y_train, y_test = load_data()
    with strategy.scope():
        model = build_model(epochs * -(-len(x_train) // BATCH_SIZE))
    start = time.perf_counter()
    model.fit(x_train, y_train, batch_size=BATCH_SIZE, epochs=epochs, verbose=2)
    speed = epochs * len(x_train) / (time.perf_counter() - start)

    _, accuracy = model.evaluate(x_test, y_test, batch_size=BATCH_SIZE, verbose=0)
    if options.figure:
        draw(options.figure, y_test, model.predict(x_test, verbose=0).argmax(axis=1))
    replicas = strategy.num_replicas_in_sync
    print(
        f"{replicas} replicas: test accuracy {accuracy:.4f}, {speed:.0f} examples/s with compiling"
    )


if __name__ == "__main__":
    main()
