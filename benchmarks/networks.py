"""What the benchmarks train, in Keras.

A tiny model, whose step is all overhead; an MLP; a CNN like a small ResNet; a transformer; and, for
accelerators, a decoder of 98 million weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

CLASSES = 10
TINY_WIDTHS = (8, 1)
MLP_WIDTHS = (784, 512, 512, CLASSES)
IMAGE = (32, 32, 3)
STAGES = (32, 64, 128)
SEQUENCE, VOCABULARY = 128, 1000
WIDTH, HEADS, BLOCKS, DROPOUT = 256, 4, 4, 0.1
TOKENS, WORDS = 256, 8192


@dataclass(frozen=True)
class Task:
    """A network and its data: global batch size, steps in a round.

    Attributes:
        name: What to call it.
        batch: The size of a global batch.
        steps: How many there are in a round.
        network: Makes the Keras model, which returns logits or, for a regression, numbers.
        rows: Makes so many examples and labels.
        is_regression: Whether the loss is the squared error, not the cross-entropy.
    """

    name: str
    batch: int
    steps: int
    network: Callable[[], Any]
    rows: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]
    is_regression: bool = False

    def model(self) -> Any:
        """Returns the Keras model, the same one on all workers."""
        import keras

        keras.utils.set_random_seed(0)
        return self.network()

    def loss(self) -> Any:
        """Returns Keras's loss, to compile the model with."""
        import keras

        if self.is_regression:
            return keras.losses.MeanSquaredError()
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def errors(self, y: Any, predicted: Any) -> Any:
        """Returns the loss of each example, of which the loss of a batch is the mean."""
        import keras

        if self.is_regression:
            errors = keras.losses.mean_squared_error(y, predicted)
        else:
            errors = keras.losses.sparse_categorical_crossentropy(y, predicted, from_logits=True)
        if len(errors.shape) == 1:
            return errors
        return keras.ops.mean(keras.ops.reshape(errors, (keras.ops.shape(errors)[0], -1)), axis=-1)

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the examples and labels of a round, the same ones on all workers."""
        return self.rows(np.random.default_rng(0), self.batch * self.steps)

    def batches(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the global batches of a round."""
        x, y = self.data()
        begins = range(0, len(x), self.batch)
        return [tuple(array[begin:][: self.batch] for array in (x, y)) for begin in begins]


def _tiny() -> Any:
    return _dense(TINY_WIDTHS)


def _tiny_rows(generator, number):
    return tuple(generator.normal(size=(number, width)).astype("float32") for width in TINY_WIDTHS)


def _mlp() -> Any:
    return _dense(MLP_WIDTHS)


def _dense(widths) -> Any:
    import keras

    features, *hidden, last = widths
    layers = [keras.layers.Dense(width, activation="relu") for width in hidden]
    return keras.Sequential([keras.Input((features,)), *layers, keras.layers.Dense(last)])


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
        Task("tiny", 4, 400, _tiny, _tiny_rows, is_regression=True),
        Task("mlp", 256, 80, _mlp, _mlp_rows),
        Task("cnn", 64, 8, _cnn, _cnn_rows),
        Task("transformer", 16, 4, _transformer, _transformer_rows),
    )
}


def _decoder() -> Any:
    return _example().build_model(blocks=12, width=768, length=TOKENS, vocabulary=WORDS)


def _decoder_rows(generator, number):
    del generator  # they follow a rule
    tokens = _example().sequences(number, TOKENS, WORDS)
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


@cache
def _example() -> Any:
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    import transformer

    return transformer


DECODER = Task("decoder", 32, 20, _decoder, _decoder_rows)
"""`examples/transformer.py`, of which `docs/guides/plan.md` has the plan."""
