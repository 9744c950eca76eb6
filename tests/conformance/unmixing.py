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
    inputs = keras.Input((FEATURES,))
    x = keras.layers.Dense(6, activation="tanh")(inputs)
    for layer in middle:
        x = layer(x)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    return compiled(model, **{"optimizer": "adam", "loss": own_loss, **options})


def sequence(*middle, **options):
    inputs = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, 4, mask_zero=True)(inputs)
    for layer in middle:
        x = layer(x)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    return compiled(model, **{"optimizer": "adam", "loss": own_loss, **options})


def residual(**options):
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

    return network(Residual(), **options)


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


def masked_loss():
    class Masked(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return keras.ops.square(y_true - y_pred)[..., 0]

    return sequence(loss=Masked())


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


def convolution():
    inputs = keras.Input((FEATURES,))
    x = keras.layers.Reshape((FEATURES, 1))(inputs)
    x = keras.layers.Conv1D(3, 2, padding="same")(x)
    x = keras.layers.Lambda(lambda x: keras.ops.relu(x) + 1)(keras.layers.BatchNormalization()(x))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(x)))
    return compiled(model, "adam", "mse")


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


def word_by_word() -> tuple[Any, ...]:
    ids = tokens(N)
    return ids, (ids[..., None] / VOCABULARY).astype("float32")


# A name, what makes the model, and its data.
MODELS: dict[str, tuple[Any, Any]] = {
    "dropout": (lambda: network(keras.layers.Dropout(0.5)), numbers),
    "seeded noise": (lambda: network(keras.layers.GaussianNoise(0.5, seed=3)), numbers),
    "unseeded noise": (lambda: network(keras.layers.GaussianDropout(0.5)), numbers),
    "a layer with norm and dropout": (residual, numbers),
    "draws in a layer": (noisy, numbers),
    "a mask in the loss": (masked_loss, word_by_word),
    "attention and recurrence, with a mask": (attention, words),
    "a convolution and a Lambda": (convolution, numbers),
    "mixed_bfloat16": (mixed("mixed_bfloat16"), numbers),
    "mixed_float16": (mixed("mixed_float16"), numbers),
    "float64": (mixed("float64"), numbers),
    "accumulation, clipping, EMA": (
        lambda: network(
            optimizer=keras.optimizers.AdamW(
                0.01, clipnorm=0.1, use_ema=True, gradient_accumulation_steps=2
            )
        ),
        numbers,
    ),
}
