"""Learn from images without labels: SimCLR, with the negatives of all devices.

Two distorted views of an image should be near each other, and far from the views of the other
images of the batch. Many other images are better than few, so a device must also see the views on
other devices: `kd.global_batch` returns all rows of the batch, with gradients. At the end a linear
classifier that is trained with 20 labels measures how good the features are.

All workers draw the same distortions, so runs differ only by rounding. Training amplifies rounding:
in float32, one process and two workers on PyTorch end with losses that differ by 0.006 and
accuracies that differ by 0.01. With `--floatx float64` both print the same numbers.

    KERAS_BACKEND=jax python examples/contrastive_simclr.py
"""

import argparse
from typing import Any

import keras
import numpy as np
from keras import layers, ops
from scipy import ndimage
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

import kerasdist as kd

BATCH_SIZE = 256
TEMPERATURE = 0.2


class ContrastiveLoss(keras.losses.Loss):
    """The cross-entropy of finding an image's second view among all images' second views."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Return the mean over all images of the global batch, the same on each device."""
        del y_true  # there are no labels
        views = kd.global_batch(y_pred)  # (images, 2, features); without it: this device's images
        views = views / ops.norm(views, axis=-1, keepdims=True)
        first, second = views[:, 0], views[:, 1]
        similarity = ops.matmul(first, ops.transpose(second)) / TEMPERATURE
        correct = ops.arange(ops.shape(similarity)[0])
        to_second = keras.losses.sparse_categorical_crossentropy(correct, similarity, True)
        to_first = keras.losses.sparse_categorical_crossentropy(
            correct, ops.transpose(similarity), True
        )
        return ops.mean(to_second + to_first) / 2


def distort(images: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return the images, each turned and shifted by chance, with a little noise."""
    turned = [
        ndimage.shift(
            ndimage.rotate(image, random.uniform(-20, 20), reshape=False, order=1),
            random.uniform(-1, 1, size=2),
            order=1,
        )
        for image in images
    ]
    noise = random.normal(scale=0.05, size=images.shape)
    return (np.stack(turned) * random.uniform(0.7, 1.3) + noise).astype("float32")


def build_models() -> tuple[keras.Model, keras.Model]:
    """Return the network that makes features, and the compiled model that trains it."""
    encoder = keras.Sequential(
        [
            keras.Input((8, 8)),
            layers.Reshape((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, strides=2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(64),
        ]
    )
    head = keras.Sequential([layers.Dense(64, activation="relu"), layers.Dense(32)])
    pair = keras.Input((2, 8, 8))
    features = head(encoder(ops.reshape(pair, (-1, 8, 8))))
    model = keras.Model(pair, ops.reshape(features, (-1, 2, 32)))
    model.compile(optimizer=keras.optimizers.Adam(2e-3), loss=ContrastiveLoss())
    return encoder, model


def draw(path: str, digits: np.ndarray, **points: np.ndarray) -> None:
    """Draw maps on which neighbours are near each other, with a colour for each digit."""
    import matplotlib.pyplot as plt
    from sklearn.manifold import TSNE

    _, axes = plt.subplots(1, len(points), figsize=(6.4, 4), layout="constrained")
    for place, (name, x) in zip(axes, points.items(), strict=True):
        places = TSNE(random_state=0).fit_transform(x)
        place.scatter(*places.T, c=digits, s=6, cmap="tab10")
        place.set(title=name, xticks=[], yticks=[])
    plt.savefig(path)


def main() -> None:
    """Train without labels; print the accuracy of a linear classifier on the features."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--floatx", default="float32")
    parser.add_argument("--figure", help="a PNG file to write")
    options = parser.parse_args()

    if kd.cluster.detect() is None:  # not a worker of a job
        kd.config.set_logical_cpu_devices(2)  # used where there is no accelerator
    strategy = kd.auto()
    keras.config.set_floatx(options.floatx)
    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)  # all workers draw the same views
    digits = load_digits()
    images = (digits.images / 16.0).astype("float32")
    with strategy.scope():
        encoder, model = build_models()
    labels = np.zeros(1200)  # `fit` wants targets; the loss does not read them
    for epoch in range(options.epochs):
        views = np.stack([distort(images[:1200], random) for _ in range(2)], axis=1)
        history = model.fit(views, labels, batch_size=BATCH_SIZE, verbose=0)
        print(f"epoch {epoch + 1}: loss {history.history['loss'][-1]:.4f}")

    def accuracy(x: np.ndarray) -> float:
        few = slice(1180, 1200)  # 20 images, of which the classifier sees the labels
        classifier = LogisticRegression(max_iter=1000).fit(x[few], digits.target[few])
        return float(classifier.score(x[1200:], digits.target[1200:]))

    features = encoder.predict(images, batch_size=BATCH_SIZE, verbose=0)
    features *= 5 / np.linalg.norm(features, axis=1, keepdims=True)
    learned, pixels = accuracy(features), accuracy(digits.data / 16)
    if options.figure:
        unseen = slice(1200, None)
        draw(
            *(options.figure, digits.target[unseen]),
            pixels=digits.data[unseen],
            features=features[unseen],
        )
    replicas = strategy.num_replicas_in_sync
    print(f"{replicas} replicas: accuracy {learned:.4f} with 20 labels; from pixels {pixels:.4f}")


if __name__ == "__main__":
    main()
