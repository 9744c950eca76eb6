"""What benchmarks/multiworker.py trains, in Keras: an MLP, a ResNet-like CNN, a transformer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

CLASSES = 10
MLP_WIDTHS = (784, 512, 512, CLASSES)
IMAGE = (32, 32, 3)
STAGES = (32, 64, 128)
SEQUENCE, VOCABULARY = 128, 1000
WIDTH, HEADS, BLOCKS, DROPOUT = 256, 4, 4, 0.1


@dataclass(frozen=True)
class Task:
    """A network and its data: global batch size, steps in a round.

    Attributes:
        name: What to call it.
        batch: The size of a global batch.
        steps: How many there are in a round.
        network: Makes the Keras model, which returns logits.
        rows: Makes so many examples and labels.
    """

    name: str
    batch: int
    steps: int
    network: Callable[[], Any]
    rows: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the examples and labels of a round, the same ones on all workers."""
        return self.rows(np.random.default_rng(0), self.batch * self.steps)


def _mlp() -> Any:
    import keras

    features, *hidden, classes = MLP_WIDTHS
    layers = [keras.layers.Dense(width, activation="relu") for width in hidden]
    return keras.Sequential([keras.Input((features,)), *layers, keras.layers.Dense(classes)])


def _mlp_rows(generator, number):
    x = generator.normal(size=(number, MLP_WIDTHS[0])).astype("float32")
    return x, generator.integers(CLASSES, size=number, dtype="int32")


def _cnn() -> Any:
    import keras

    layers = keras.layers

    def normalized_convolution(x, filters, strides=1, size=3):
        convolution = layers.Conv2D(filters, size, strides, "same", use_bias=False)
        return layers.BatchNormalization()(convolution(x))

    inputs = keras.Input(IMAGE)
    x = layers.ReLU()(normalized_convolution(inputs, STAGES[0]))
    for filters in STAGES:
        strides = 1 if filters == STAGES[0] else 2
        shortcut = x if strides == 1 else normalized_convolution(x, filters, strides, size=1)
        x = layers.ReLU()(normalized_convolution(x, filters, strides))
        x = layers.ReLU()(layers.Add()([normalized_convolution(x, filters), shortcut]))
    outputs = layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, outputs)


def _cnn_rows(generator, number):
    x = generator.normal(size=(number, *IMAGE)).astype("float32")
    return x, generator.integers(CLASSES, size=number, dtype="int32")


def _transformer() -> Any:
    import keras

    layers = keras.layers

    class Positions(layers.Layer):
        def build(self, shape):
            self.table = self.add_weight(shape=shape[1:], initializer="normal", name="table")

        def call(self, x):
            return x + self.table

    inputs = keras.Input((SEQUENCE,), dtype="int32")
    x = Positions()(layers.Embedding(VOCABULARY, WIDTH)(inputs))
    for _ in range(BLOCKS):
        attended = layers.LayerNormalization(epsilon=1e-5)(x)
        attended = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(attended, attended)
        x = layers.Add()([x, layers.Dropout(DROPOUT)(attended)])
        thought = layers.Dense(4 * WIDTH, "relu")(layers.LayerNormalization(epsilon=1e-5)(x))
        thought = layers.Dense(WIDTH)(layers.Dropout(DROPOUT)(thought))
        x = layers.Add()([x, layers.Dropout(DROPOUT)(thought)])
    return keras.Model(inputs, layers.Dense(VOCABULARY)(layers.LayerNormalization(epsilon=1e-5)(x)))


def _transformer_rows(generator, number):
    tokens = generator.integers(VOCABULARY, size=(number, SEQUENCE + 1), dtype="int32")
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


TASKS = {
    task.name: task
    for task in (
        Task("mlp", 256, 160, _mlp, _mlp_rows),
        Task("cnn", 64, 16, _cnn, _cnn_rows),
        Task("transformer", 16, 8, _transformer, _transformer_rows),
    )
}
