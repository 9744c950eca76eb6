"""Thirty small models with user code that mixes no examples: nothing is to be said."""

from typing import Any

import numpy as np

from tests.conformance import steps
from tests.conformance.lazy import kd, keras
from tests.conformance.models import (
    CLASSES,
    FEATURES,
    VOCABULARY,
    classification,
    regression,
    tokens,
    weights_for,
)

N = 11


def own_loss(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


def own_mean_loss(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_true - y_pred))


def own_metric(y_true, y_pred):
    return keras.ops.max(keras.ops.abs(y_true - y_pred), axis=-1)


def own_accuracy(y_true, y_pred):
    return keras.metrics.sparse_categorical_accuracy(y_true, y_pred)


def network(*middle, outputs=1, **compiled):
    """Dense layers around some others; the loss is the user's unless said otherwise."""
    inputs = keras.Input((FEATURES,))
    x = keras.layers.Dense(6, activation="tanh")(inputs)
    for layer in middle:
        x = layer(x)
    model = keras.Model(inputs, keras.layers.Dense(outputs)(x))
    model.compile(**{"optimizer": "adam", "loss": own_loss, **compiled})
    return model


def sequence(*middle, **compiled):
    inputs = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, 4, mask_zero=True)(inputs)
    for layer in middle:
        x = layer(x)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model.compile(**{"optimizer": "adam", "loss": own_loss, **compiled})
    return model


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

    model_inputs = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, 4, mask_zero=True)(model_inputs)
    model = keras.Model(model_inputs, keras.layers.Dense(1)(x))
    model.compile("adam", Masked())
    return model


def two_outputs():
    inputs = keras.Input((FEATURES,))
    hidden = keras.layers.Dense(6, activation="relu")(inputs)
    first, second = keras.layers.Dense(1, name="a")(hidden), keras.layers.Dense(1, name="b")(hidden)
    model = keras.Model(inputs, {"a": first, "b": second})
    losses = {"a": own_loss, "b": own_mean_loss}
    model.compile("rmsprop", losses, loss_weights={"a": 1.0, "b": 0.3}, metrics={"a": own_metric})
    return model


def subclassed(**compiled):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = keras.layers.Dense(6, activation="gelu")
            self.second = keras.layers.Dense(1)
            self.calls = 0

        def call(self, x, training=None):
            self.calls += 1
            return self.second(self.first(x))

    model = Own()
    model.compile(**{"optimizer": "adam", "loss": "mse", **compiled})
    return model


def adding():
    class Adding(keras.layers.Layer):
        def call(self, x):
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
            return x

    return network(Adding())


def attention():
    class Attending(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.attention = keras.layers.MultiHeadAttention(2, 3, dropout=0.2)

        def build(self, shape):
            self.attention.build(shape, shape)

        def call(self, x):
            return keras.ops.mean(self.attention(x, x), axis=1)

    return sequence(Attending())


def convolution():
    inputs = keras.Input((FEATURES,))
    x = keras.layers.Reshape((FEATURES, 1))(inputs)
    x = keras.layers.Conv1D(3, 2, padding="same")(x)
    x = keras.layers.Lambda(lambda x: keras.ops.relu(x) + 1)(keras.layers.BatchNormalization()(x))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(x)))
    model.compile("adam", "mse")
    return model


def classifier(**compiled):
    return network(keras.layers.LayerNormalization(), outputs=CLASSES, **compiled)


def class_metric():
    class Largest(keras.metrics.Metric):
        def __init__(self, name="largest", **options):
            super().__init__(name=name, **options)
            self.value = self.add_weight(shape=(), initializer="zeros", name="value")

        def update_state(self, y_true, y_pred, sample_weight=None):
            found = keras.ops.max(keras.ops.abs(y_true - y_pred))
            self.value.assign(keras.ops.maximum(self.value, found))

        def result(self):
            return self.value

    return network(metrics=[Largest()])


def computed_loss():
    class Own(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            loss = super().compute_loss(x, y, y_pred, sample_weight, training)
            return loss + 0.1 * keras.ops.mean(keras.ops.square(y_pred))

    inputs = keras.Input((FEATURES,))
    model = Own(inputs, keras.layers.Dense(1)(inputs))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def own_step(kind: Any):
    inputs = keras.Input((FEATURES,))
    model = kind()(inputs, keras.layers.Dense(1)(keras.layers.Dense(5)(inputs)))
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


def operations():
    inputs = keras.Input((FEATURES,))
    x = keras.layers.Dense(6)(inputs)
    x = x / (1.0 + keras.ops.sum(keras.ops.abs(x), axis=-1, keepdims=True))
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model.compile("adam", "mse")
    return model


def gathered():
    def loss(y_true, y_pred):
        y_true, y_pred = kd.global_batch(y_true), kd.global_batch(y_pred)
        return keras.ops.mean(keras.ops.square(y_pred - keras.ops.mean(y_true)))

    return network(loss=loss)


def teacher():
    """A variable of the model's own that follows another one."""

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = keras.layers.Dense(1)
            self.mean = self.add_weight(
                shape=(), initializer="zeros", trainable=False, aggregation="mean"
            )

        def build(self, shape):
            self.first.build(shape)

        def call(self, x):
            y = self.first(x)
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(y))
            return y

    model = Own()
    model.compile("adam", "mse")
    return model


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


def weighted() -> tuple[Any, ...]:
    return (*regression(N), weights_for(N))


def classes() -> tuple[Any, ...]:
    return classification(N)


def words() -> tuple[Any, ...]:
    return tokens(N), np.linspace(-1, 1, N, dtype="float32")[:, None]


def word_by_word() -> tuple[Any, ...]:
    ids = tokens(N)
    return ids, (ids[..., None] / VOCABULARY).astype("float32")


def pairs() -> tuple[Any, ...]:
    x, y = regression(N)
    return x, {"a": y, "b": -y}


# A name, what makes the model of the backend's name, and its data.
MODELS: dict[str, tuple[Any, Any]] = {
    "a loss function": (lambda _: network(), numbers),
    "a loss function that takes the mean": (lambda _: network(loss=own_mean_loss), numbers),
    "sample weights": (lambda _: network(weighted_metrics=["mae"]), weighted),
    "a metric function": (lambda _: network(loss="mse", metrics=[own_metric]), numbers),
    "a metric class": (lambda _: class_metric(), numbers),
    "dropout": (lambda _: network(keras.layers.Dropout(0.5)), numbers),
    "seeded noise": (lambda _: network(keras.layers.GaussianNoise(0.5, seed=3)), numbers),
    "unseeded noise": (lambda _: network(keras.layers.GaussianDropout(0.5)), numbers),
    "batch normalization": (lambda _: network(keras.layers.BatchNormalization()), numbers),
    "a layer with norm and dropout": (lambda _: residual(), numbers),
    "draws in a layer": (lambda _: noisy(), numbers),
    "a mask": (lambda _: sequence(keras.layers.GlobalAveragePooling1D()), words),
    "a mask in the loss": (lambda _: masked_loss(), word_by_word),
    "a recurrent layer": (lambda _: sequence(keras.layers.GRU(3, dropout=0.2)), words),
    "a bidirectional layer": (
        lambda _: sequence(keras.layers.Bidirectional(keras.layers.LSTM(2))),
        words,
    ),
    "attention": (lambda _: attention(), words),
    "a convolution and a Lambda": (lambda _: convolution(), numbers),
    "two outputs": (lambda _: two_outputs(), pairs),
    "a subclassed model": (lambda _: subclassed(), numbers),
    "run eagerly": (lambda _: subclassed(run_eagerly=True), numbers),
    "add_loss of a mean": (lambda _: adding(), numbers),
    "regularizers": (
        lambda _: network(
            keras.layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l1")
        ),
        numbers,
    ),
    "classes": (
        lambda _: classifier(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[own_accuracy, "accuracy"],
        ),
        classes,
    ),
    "compute_loss": (lambda _: computed_loss(), weighted),
    "Keras's guide": (lambda backend: own_step(steps.guide_model(backend)), weighted),
    "a step with a raw mean": (lambda backend: own_step(steps.raw_loss_model(backend)), numbers),
    "operations": (lambda _: operations(), numbers),
    "global_batch": (lambda _: gathered(), numbers),
    "a variable of the model's own": (lambda _: teacher(), numbers),
    "mixed_bfloat16": (lambda _: mixed("mixed_bfloat16")(), numbers),
    "mixed_float16": (lambda _: mixed("mixed_float16")(), numbers),
    "float64": (lambda _: mixed("float64")(), numbers),
    "accumulation, clipping, EMA": (
        lambda _: network(
            optimizer=keras.optimizers.AdamW(
                0.01, clipnorm=0.1, use_ema=True, gradient_accumulation_steps=2
            )
        ),
        numbers,
    ),
}
