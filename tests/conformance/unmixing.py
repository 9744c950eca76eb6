"""Small models with user code that draws, and mixes no examples: nothing is to be said.

Draws are not one device's, so no case compares these models with it. Of all that are compared,
`Lab.same` sees to it that nothing is said.
"""

from typing import Any

import numpy as np

from tests.conformance.lazy import keras
from tests.conformance.models import FEATURES, VOCABULARY, compiled, regression, tokens

N = 11


def own_loss(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


def network(*middle, **options):
    """Dense layers around some others; the loss is the user's unless said otherwise."""
    first = keras.layers.Dense(6, activation="tanh")
    return assemble(keras.Input((FEATURES,)), first, *middle, **options)


def sequence(*middle):
    words = keras.layers.Embedding(VOCABULARY, 4, mask_zero=True)
    return assemble(keras.Input((None,), dtype="int32"), words, *middle)


def assemble(inputs, *layers, **options):
    x = inputs
    for layer in (*layers, keras.layers.Dense(1)):
        x = layer(x)
    return compiled(keras.Model(inputs, x), **{"optimizer": "adam", "loss": own_loss, **options})


def residual():
    class Residual(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense, self.norm = keras.layers.Dense(6), keras.layers.BatchNormalization()
            self.drop = keras.layers.Dropout(0.4)

        def build(self, shape):
            self.dense.build(shape)
            self.norm.build(shape)

        def call(self, x, training=None):
            return x + self.drop(self.norm(self.dense(x), training=training), training=training)

    return network(Residual())


def noisy():
    """A layer that draws for each example, and one that draws for each feature."""

    class Sampling(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.seeds = keras.random.SeedGenerator(3)

        def call(self, x):
            by_example = keras.random.normal(keras.ops.shape(x), seed=self.seeds)
            by_feature = keras.random.uniform((x.shape[-1],), seed=self.seeds)
            return x + 0.3 * by_example * by_feature

    return network(Sampling())


def stacked():
    """A layer that drops units of two batches of rows, one after the other, as a GAN does."""

    class Both(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.drop = keras.layers.Dropout(0.5)

        def call(self, x, training=None):
            both = self.drop(keras.ops.concatenate([x, -x]), training=training)
            rows = keras.ops.shape(x)[0]
            return both[:rows] - 2 * both[rows:]

    return network(Both())


def attention():
    class Attending(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.supports_masking = True
            self.attention = keras.layers.MultiHeadAttention(2, 3, dropout=0.2)

        def build(self, shape):
            self.attention.build(shape, shape)

        def call(self, x):
            return x + self.attention(x, x)

    return sequence(Attending(), keras.layers.GRU(3, dropout=0.2))


def mixed(policy):
    def build():
        keras.config.set_dtype_policy(policy)
        try:
            return residual()
        finally:
            keras.config.set_dtype_policy("float32")

    return build


def numbers() -> tuple[Any, ...]:
    return regression(N)


def words() -> tuple[Any, ...]:
    return tokens(N), np.linspace(-1, 1, N, dtype="float32")[:, None]


# A name, what makes the model, and its data.
MODELS: dict[str, tuple[Any, Any]] = {
    "dropout": (lambda: network(keras.layers.Dropout(0.5)), numbers),
    "seeded noise": (lambda: network(keras.layers.GaussianNoise(0.5, seed=3)), numbers),
    "unseeded noise": (lambda: network(keras.layers.GaussianDropout(0.5)), numbers),
    "a layer with norm and dropout": (residual, numbers),
    "draws in a layer": (noisy, numbers),
    "two batches in one": (stacked, numbers),
    "attention and recurrence, with a mask": (attention, words),
    "mixed_bfloat16": (mixed("mixed_bfloat16"), numbers),
    "mixed_float16": (mixed("mixed_float16"), numbers),
    "float64": (mixed("float64"), numbers),
}
