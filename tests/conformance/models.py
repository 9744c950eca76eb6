"""Small data and models that many cases share. Every number here is deterministic."""

from typing import Any

import numpy as np

from tests.conformance.lazy import keras

FEATURES = 4
CLASSES = 3
VOCABULARY = 11
STEPS_IN_TIME = 5


def regression(n: int, outputs: int = 1, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(n, FEATURES)).astype("float32")
    y = np.tanh(x[:, :outputs]) + 0.1 * random.normal(size=(n, outputs)) + 0.5
    return x, y.astype("float32")


def classification(n: int) -> tuple[np.ndarray, np.ndarray]:
    x, _ = regression(n)
    return x, np.argmax(x[:, :CLASSES], axis=1).astype("int32")


def binary(n: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(n, FEATURES)).astype("float32")
    return x, (x[:, :1] + 0.3 * random.normal(size=(n, 1)) > 0).astype("float32")


def weights_for(n: int, seed: int = 7) -> np.ndarray:
    """Sample weights, some of them zero."""
    random = np.random.default_rng(seed)
    drawn = random.uniform(0.1, 2.0, size=n).astype("float32")
    drawn[::4] = 0.0
    return drawn


def tokens(n: int, seed: int = 0) -> np.ndarray:
    """Sequences padded with 0 at the end, of very different lengths."""
    random = np.random.default_rng(seed)
    ids = random.integers(1, VOCABULARY, size=(n, STEPS_IN_TIME)).astype("int32")
    lengths = random.integers(1, STEPS_IN_TIME + 1, size=n)
    ids[np.arange(STEPS_IN_TIME)[None, :] >= lengths[:, None]] = 0
    return ids


def dataset_of(batch: Any, count: int, **options) -> Any:
    """A `PyDataset` of so many batches, each of which a function makes from its number."""

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return count

        def __getitem__(self, index):
            return batch(index)

    return Batches(**options)


def compiled(model: Any, *arguments: Any, **options: Any) -> Any:
    model.compile(*arguments, **options)
    return model


def stack(
    layers: list[Any],
    optimizer: Any = None,
    loss: Any = "mse",
    inputs: Any = (FEATURES,),
    **options,
) -> Any:
    """A Sequential of these layers, compiled with what `compile` is given, or SGD and squares."""
    first = keras.Input(inputs) if isinstance(inputs, tuple) else inputs
    model = keras.Sequential([first, *layers])
    return compiled(model, optimizer or keras.optimizers.SGD(0.1), loss, **options)


def dense(optimizer: Any = None, loss: Any = "mse", metrics: Any = ("mae",), **options) -> Any:
    """Dense 4→6→1, SGD with momentum: enough state to go wrong, quick to trace."""
    layers = [keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)]
    optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)
    return stack(layers, optimizer, loss, metrics=list(metrics), **options)


def in_half_precision() -> Any:
    """Dense, normalization, dense under `mixed_float16`, with a scale at which nothing overflows.

    Where a gradient nearly does, rounding decides whether a step is taken.
    """
    keras.config.set_dtype_policy("mixed_float16")
    layers = keras.layers
    normal = layers.BatchNormalization(momentum=0.5)
    inner = keras.optimizers.SGD(0.05)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**8)
    layers = [layers.Dense(6, activation="tanh"), normal, layers.Dense(1)]
    return stack(layers, optimizer, weighted_metrics=["mae"])


def tagger(loss: Any = None, **options) -> Any:
    """A label for every step in time, with the mask of the padding."""
    layers = keras.layers
    words = layers.Embedding(VOCABULARY, 4, mask_zero=True)
    tokens = keras.Input((STEPS_IN_TIME,), dtype="int32")
    options.setdefault("metrics", ["mae"])
    layers = [words, layers.Dense(5, activation="tanh"), layers.Dense(1)]
    return stack(layers, None, loss or "mse", tokens, **options)


def classifier(optimizer: Any = None, **options) -> Any:
    layers = [keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(CLASSES, "softmax")]
    options.setdefault("metrics", ["accuracy"])
    return stack(layers, optimizer, "sparse_categorical_crossentropy", **options)


def watched() -> Any:
    """A layer that passes its input on, and updates a metric in `call`."""

    class Watched(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.watch = keras.metrics.Mean(name="activation")

        def call(self, x):
            self.watch.update_state(keras.ops.mean(x, axis=-1))
            return x

    return Watched()


def largest_error(name="largest", error=None):
    class LargestError(keras.metrics.Metric):
        """Its state is a maximum: adding it up over replicas is wrong."""

        def __init__(self, name):
            super().__init__(name=name)
            self.largest = self.add_variable((), "zeros", name="largest")

        def update_state(self, y_true, y_pred, sample_weight=None):
            errors = (error or keras.ops.subtract)(y_true, y_pred)
            found = keras.ops.max(keras.ops.abs(errors))
            self.largest.assign(keras.ops.maximum(self.largest, found))

        def result(self):
            return self.largest + 0.0

    return LargestError(name)
