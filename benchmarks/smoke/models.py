"""The small models of the parts about correctness, their data, and how outcomes are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

ROWS, BATCH, EPOCHS, CLASSES = 50, 16, 2, 5  # the last batch has two rows
SEED = 7


@dataclass(frozen=True)
class Example:
    """A model and its data.

    Attributes:
        build: Makes the model, with a rate of dropout.
        shape: The shape of one input.
        tokens: How many tokens there are, if the inputs are numbers of tokens.
    """

    build: Callable[[float], Any]
    shape: tuple[int, ...]
    tokens: int = 0

    def compiled(self, dropout: float = 0.0) -> Any:
        """Returns the model, compiled; it is the same one each time."""
        import keras

        keras.utils.set_random_seed(SEED)
        model = self.build(dropout)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
        return model

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs and labels."""
        draws = np.random.default_rng(SEED)
        shape = (ROWS, *self.shape)
        x = draws.normal(size=shape).astype("float32")
        if self.tokens:
            x = draws.integers(self.tokens, size=shape, dtype="int32")
        return x, draws.integers(CLASSES, size=ROWS, dtype="int32")


def _mlp(dropout: float) -> Any:
    from keras import Input, Sequential, layers

    hidden = layers.Dense(32, activation="relu")
    return Sequential([Input((12,)), hidden, layers.Dropout(dropout), _logits()])


def _cnn(dropout: float) -> Any:
    from keras import Input, Sequential, layers

    convolution = layers.Conv2D(8, 3, padding="same", use_bias=False)
    inner = [convolution, layers.BatchNormalization(), layers.ReLU(), layers.Dropout(dropout)]
    return Sequential([Input((8, 8, 3)), *inner, layers.GlobalAveragePooling2D(), _logits()])


def _lstm(dropout: float) -> Any:
    from keras import Input, Sequential, layers

    return Sequential([Input((6, 4)), layers.LSTM(8, dropout=dropout), _logits()])


def _transformer(dropout: float) -> Any:
    from keras import Input, Model, layers

    inputs = Input((6,), dtype="int32")
    x = layers.Embedding(20, 16)(inputs)
    attended = layers.MultiHeadAttention(2, 8, dropout=dropout)(x, x)
    x = layers.LayerNormalization()(layers.Add()([x, attended]))
    return Model(inputs, _logits()(layers.GlobalAveragePooling1D()(x)))


def _logits() -> Any:
    from keras import layers

    return layers.Dense(CLASSES, dtype="float32")


EXAMPLES = {
    "mlp": Example(_mlp, (12,)),
    "cnn": Example(_cnn, (8, 8, 3)),
    "lstm": Example(_lstm, (6, 4)),
    "transformer": Example(_transformer, (6,), tokens=20),
}


def outcome(model: Any, x: Any, y: Any, **options: Any) -> dict[str, Any]:
    """Trains a model; returns all that it has to show."""
    import keras

    keras.utils.set_random_seed(SEED + 1)
    history = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, **options)
    return {
        **{name: np.array(values) for name, values in history.history.items()},
        "evaluate": np.array(model.evaluate(x, y, batch_size=BATCH, verbose=0)),
        "predict": model.predict(x, batch_size=BATCH, verbose=0),
        **weights(model),
    }


def weights(model: Any) -> dict[str, Any]:
    """Returns the weights, by number."""
    return {f"weight {number}": value for number, value in enumerate(model.get_weights())}


def exact() -> None:
    """Switches the shorter floats off that GPUs take for products: they are right to 1e-3 only."""
    import keras

    backend = keras.backend.backend()
    if backend == "torch":
        import torch

        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True
    elif backend == "jax":
        import jax

        jax.config.update("jax_default_matmul_precision", "highest")
    else:
        import tensorflow as tf

        tf.config.experimental.enable_tensor_float_32_execution(False)


def difference(expected: Mapping[str, Any], actual: Mapping[str, Any], most: float) -> float:
    """Returns the largest difference between two outcomes, relative to numbers above 1.

    Raises:
        AssertionError: If it is more than `most`.
    """
    if expected.keys() != actual.keys():
        raise AssertionError(f"Expected {list(expected)}. Received: {list(actual)}.")
    found = {
        name: float(np.max(np.abs(value - actual[name]) / np.maximum(1, np.abs(value))))
        for name, value in expected.items()
    }
    worst = max(found, key=lambda name: found[name])
    if not found[worst] <= most:  # NaN too
        raise AssertionError(f"Expected differences up to {most}. Received: {found}.")
    return found[worst]
