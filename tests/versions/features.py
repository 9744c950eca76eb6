"""What uses each internal: functions that `tests.versions.gone` runs where it is gone.

One that is `refused` must end in the `VersionError` that names the internal and its feature. One
that `goes_on` runs to its end, and looks at what happens in place of the feature, as its
declaration says. Several internals can have one function.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Here:
    """What a feature's function has."""

    keras: ModuleType
    kd: ModuleType
    strategy: Any
    x: np.ndarray
    y: np.ndarray

    def model(self, **options: Any) -> Any:
        """A dense model of the strategy, from the same weights always; options are `compile`'s."""
        with self.strategy.scope():
            return dense(self.keras, **options)

    def fit(self, model: Any) -> list[float]:
        return fit(model, self.x, self.y)


def dense(keras: ModuleType, **options: Any) -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.layers[0].set_weights([np.linspace(-1, 1, 6).reshape(3, 2), np.array([0.5, -0.5])])
    model.compile(**{"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", **options})
    return model


def rows() -> tuple[np.ndarray, np.ndarray]:
    x = np.sin(np.arange(24, dtype="float32")).reshape(8, 3)
    return x, x[:, :2] * 0.5 + 1


def fit(model: Any, x: np.ndarray, y: np.ndarray) -> list[float]:
    """The losses of two epochs, and the weights behind them; the last batch is a ragged one."""
    history = model.fit(x[:7], y[:7], batch_size=4, epochs=2, shuffle=False, verbose=0)
    weights = np.concatenate([np.ravel(one) for one in model.get_weights()])
    return [*history.history["loss"], *map(float, weights)]


# ------------------------------------------------------------------------------- the features


def train_dense(here: Here):
    here.fit(here.model())


def train_compiled(here: Here):
    """On PyTorch without the internal: uncompiled, and a warning says so."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = here.fit(here.model(jit_compile=True))
    np.testing.assert_allclose(found, here.fit(here.model()), rtol=1e-5)
    assert any("jit_compile" in str(one.message) for one in caught), [*map(str, caught)]


@dataclass(frozen=True)
class Use:
    function: Callable[[Here], object]
    is_refused: bool


def refused(function: Callable[[Here], object]) -> Use:
    return Use(function, is_refused=True)


def goes_on(function: Callable[[Here], object]) -> Use:
    return Use(function, is_refused=False)


# By the table, and the name in it.
FEATURES: Mapping[str, Use] = {
    "keras.FLATTEN_LAYERS": refused(train_dense),
    "keras.USES_TORCH_COMPILE": refused(train_compiled),
}
