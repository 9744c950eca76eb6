"""What uses each internal: functions that `tests.versions.gone` runs where it is gone.

One that is `refused` must end in the `VersionError` that names the internal and its feature. One
that `goes_on` runs to its end, and looks at what happens in place of the feature, as its
declaration says. Several internals can have one function.
"""

import functools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Here:
    """What a feature's function has; as a worker of two, a strategy of both."""

    keras: ModuleType
    kd: ModuleType
    x: np.ndarray
    y: np.ndarray
    is_worker: bool

    @functools.cached_property
    def strategy(self) -> Any:
        return self.strategy_of()

    def strategy_of(self, **options: Any) -> Any:
        if self.is_worker:
            return self.kd.MultiWorkerMirroredStrategy(**options)
        return self.kd.MirroredStrategy(["cpu:0", "cpu:1"], **options)

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


def train(here: Here):
    here.fit(here.model())


def train_equally(here: Here):
    """A model of a model equals one device."""

    def nested() -> Any:
        inner = here.keras.Sequential([here.keras.Input((3,)), here.keras.layers.Dense(3)])
        model = here.keras.Sequential([here.keras.Input((3,)), inner, here.keras.layers.Dense(2)])
        here.keras.utils.set_random_seed(0)
        model.set_weights(
            [np.cos(np.arange(np.size(one))).reshape(one.shape) for one in model.get_weights()]
        )
        model.compile(here.keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        return model

    with here.strategy.scope():
        replicated = nested()
    np.testing.assert_allclose(here.fit(replicated), here.fit(nested()), rtol=1e-5)


def train_compiled(here: Here):
    here.fit(here.model(jit_compile=True))


def train_sharded(here: Here, **options: Any):
    with here.strategy_of(sharding=here.kd.Sharding("full", min_size=1)).scope():
        model = dense(here.keras, **options)
    here.fit(model)


def clip_sharded(here: Here):
    train_sharded(here, optimizer=here.keras.optimizers.SGD(0.1, global_clipnorm=0.1))


def add_losses(here: Here):
    keras = here.keras

    class Penalty(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(keras.ops.mean(keras.ops.square(x)))
            return x

    with here.strategy.scope():
        model = keras.Sequential([keras.Input((3,)), Penalty(), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    here.fit(model)


def mix_examples(here: Here):
    """A function of a user's, whose value may depend on all rows of the batch."""

    def far_from_the_mean(y_true: Any, y_pred: Any) -> Any:
        difference = y_pred - here.keras.ops.mean(y_true, axis=0, keepdims=True)
        return here.keras.ops.mean(here.keras.ops.square(difference), axis=-1)

    here.fit(here.model(loss=far_from_the_mean))


def reduce_a_loss_in_a_replica(here: Here):
    loss = here.keras.losses.MeanSquaredError()
    here.strategy.run(lambda: loss(here.y[:4], here.y[4:8]))


def mask_with_weights(here: Here):
    keras = here.keras
    with here.strategy.scope():
        model = keras.Sequential(
            [keras.Input((3, 1)), keras.layers.Masking(), keras.layers.Dense(1)]
        )
        model.compile("sgd", keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    x = here.x[:, :, None]
    model.fit(x, x, sample_weight=np.ones((8, 3), "float32"), batch_size=4, verbose=0)


def normalize(here: Here):
    keras = here.keras
    with here.strategy.scope():
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
        )
        model.compile("sgd", "mse")
    here.fit(model)


def train_outside(here: Here):
    """In a process without a job Keras wraps nothing."""
    fit(dense(here.keras), here.x, here.y)
    here.fit(here.model())


def _saved(here: Here, save: Callable[[Any, str], object]):
    with tempfile.TemporaryDirectory() as folder:
        save(here.model(), folder)


def save_model(here: Here):
    _saved(here, lambda model, folder: model.save(f"{folder}/model.keras"))


def save_weights(here: Here):
    _saved(here, lambda model, folder: model.save_weights(f"{folder}/model.weights.h5"))


def save_hdf5(here: Here):
    _saved(here, lambda model, folder: model.save(f"{folder}/model.h5"))


def draw(here: Here):
    keras = here.keras
    with here.strategy.scope():
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(2)]
        )
        model.compile("sgd", "mse")
    here.fit(model)


def remat(here: Here):
    keras = here.keras
    with here.strategy.scope(), keras.RematScope(mode="full"):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    here.fit(model)


def give_a_gradient(here: Here):
    keras = here.keras

    @keras.ops.custom_gradient
    def double(x: Any) -> Any:
        return (
            2 * x,
            lambda *arguments, upstream=None: 2 * (arguments[0] if arguments else upstream),
        )

    class Double(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return double(x)

    with here.strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), Double()])
        model.compile("sgd", "mse")
    here.fit(model)


@dataclass(frozen=True)
class Use:
    """A function, and what comes of it; on some backends two workers run it."""

    function: Callable[[Here], object]
    is_refused: bool
    workers_on: tuple[str, ...]


def refused(function: Callable[[Here], object], workers_on: tuple[str, ...] = ()) -> Use:
    return Use(function, True, workers_on)


def goes_on(function: Callable[[Here], object], workers_on: tuple[str, ...] = ()) -> Use:
    return Use(function, False, workers_on)


_TORCH = ("torch",)  # where state is sharded over processes alone
# By the table, and the name in it.
FEATURES: Mapping[str, Use] = {
    "keras.FLATTEN_LAYERS": goes_on(train_equally),
    "keras.SYMBOLIC_BUILD": refused(train),
    "keras.MAYBE_SYMBOLIC_BUILD": refused(train),
    "keras.GET_JAX_STATE": refused(train),
    "keras.PURGE_VARIABLES": refused(train),
    "keras.JAX_STATE": refused(train),
    "keras.JAX_STATE_SYNCED": refused(train),
    "keras.EPOCH_ITERATOR": refused(train),
    "keras.RESULT_OR_LOGS": goes_on(train_equally),
    "keras.USES_TORCH_COMPILE": refused(train_compiled),
    "keras.INITIALIZE_DDP": goes_on(train_outside),
    "keras.VALUE": refused(train),
    "keras.INITIALIZE": refused(train_sharded, _TORCH),
    "keras.TRACK_VARIABLES": refused(train_sharded, _TORCH),
    "keras.CLEAR_LOSSES": refused(add_losses),
    "keras.LOSS_OF_FUNCTION": refused(mix_examples),
    "keras.REDUCE_WEIGHTED_VALUES": refused(train),
    "keras.SCALE_LOSS": refused(reduce_a_loss_in_a_replica),
    "keras.UNSCALE_LOSS": refused(reduce_a_loss_in_a_replica),
    "keras.APPLY_MASK": refused(mask_with_weights),
    "keras.BATCH_MOMENTS": refused(normalize),
    "keras.NN_BATCH_NORMALIZATION": goes_on(normalize),
    "keras.SAVE_MODEL": refused(save_model),
    "keras.SAVE_WEIGHTS": refused(save_weights),
    "keras.SAVE_HDF5": refused(save_hdf5),
    "keras.APPLY_GRADIENTS": refused(train_sharded, _TORCH),
    "keras.CLIP_GRADIENTS": refused(clip_sharded, _TORCH),
    "keras.RANDOM": refused(draw),
    "keras.REMAT": refused(remat),
    "keras.CUSTOM_GRADIENT": refused(give_a_gradient),
}
