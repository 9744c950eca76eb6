"""What uses each internal: functions that `tests.versions.gone` runs where it is gone.

One that is `refused` must end in the `VersionError` that names the internal and its feature. One
that `goes_on` runs to its end, and looks at what happens in place of the feature, as its
declaration says. Several internals can have one function.
"""

import functools
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
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


def mix_examples(here: Here):
    here.fit(here.model(loss=here.keras.losses.Dice()))


def mask(here: Here):
    """Of a loss that mixes the examples of the replicas, and so their masks."""
    keras = here.keras
    with here.strategy.scope():
        layers = [keras.layers.Masking(), keras.layers.SimpleRNN(2, return_sequences=True)]
        model = keras.Sequential([keras.Input((3, 1)), *layers])
        model.compile("sgd", keras.losses.Dice())
    model.fit(here.x[:, :, None], here.x[:, :, None] * np.ones(2, "float32"), verbose=0)


def split(here: Here):
    here.model().fit(here.x, here.y, validation_split=0.5, verbose=0)


def read_a_list(here: Here):
    batches = [(here.x[:4], here.y[:4]), (here.x[4:], here.y[4:])]
    here.model().fit(here.strategy.distribute_dataset(batches), verbose=0)


def share_files(here: Here):
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(number)) for number in range(2)]
        for number, file in enumerate(files):
            np.save(file.open("wb"), here.x[number])
        lines = tf.data.FixedLengthRecordDataset([*map(str, files)], 4, header_bytes=128)
        rows = lines.map(lambda line: tf.reshape(tf.io.decode_raw(line, "float32"), ())).batch(3)
        pairs = rows.map(lambda row: (row, row[:2])).batch(2).with_options(options)
        here.model().fit(pairs, verbose=0)


def back_up(here: Here, *data: Any, **options: Any):
    with tempfile.TemporaryDirectory() as folder:
        callback = here.kd.callbacks.BackupAndRestore(folder, save_freq=1)
        here.model().fit(*data, callbacks=[callback], verbose=0, **options)


def back_up_arrays(here: Here):
    back_up(here, here.x, here.y, batch_size=4, shuffle=True)


def back_up_a_pipeline(here: Here):
    import tensorflow as tf

    pairs = tf.data.Dataset.from_tensor_slices((here.x, here.y)).cache().shuffle(8, seed=1)
    back_up(here, pairs.map(lambda x, y: (x, y)).batch(4))


def back_up_a_loader(here: Here):
    import torch

    class Loader(torch.utils.data.DataLoader):
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]):
            del state

    rows = torch.utils.data.TensorDataset(torch.tensor(here.x), torch.tensor(here.y))
    back_up(here, Loader(rows, batch_size=4))


def back_up_grain(here: Here):
    import grain

    rows = grain.MapDataset.source([*zip(here.x, here.y, strict=True)])
    back_up(here, rows.batch(4).to_iter_dataset())


def save_behind(here: Here):
    """Without the internal it is written at once, and a warning says so."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callback = here.kd.callbacks.ModelCheckpoint(f"{folder}/model.keras", save="async")
        here.model().fit(here.x, here.y, callbacks=[callback], verbose=0)
        assert any("saves at once" in str(one.message) for one in caught), caught
        assert here.keras.saving.load_model(f"{folder}/model.keras")


def scale_losses(here: Here):
    optimizer = here.keras.optimizers.LossScaleOptimizer(here.keras.optimizers.SGD(0.1))
    here.fit(here.model(optimizer=optimizer))


def compare(here: Here):
    keras = here.keras

    class Centred(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x - keras.ops.mean(x, axis=0)

    with here.strategy.scope():
        model = keras.Sequential([keras.Input((3,)), Centred(), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    here.kd.compare_with_one_device(model, here.x, here.y)


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


_ALL = ("tensorflow", "jax", "torch")
_TORCH = ("torch",)  # where state is sharded over processes alone
# By the table, and the name in it.
FEATURES: Mapping[str, Use] = {
    "keras.FLATTEN_LAYERS": goes_on(train_equally),
    "keras.SYMBOLIC_BUILD": refused(train),
    "keras.BUILD_BEFORE_FIT": goes_on(train_equally),
    "keras.MAYBE_SYMBOLIC_BUILD": refused(train),
    "keras.GET_JAX_STATE": refused(train),
    "keras.JAX_STATE": refused(train),
    "keras.THREAD_STATE": refused(train),
    "keras.SCALE_LOSS_IN_FIT": refused(train),
    "keras.UNSCALE_LOSS_IN_FIT": refused(train),
    "tensorflow.STRATEGY_STACK": refused(train),
    "jax.TRACER": refused(train),
    "keras.EPOCH_ITERATOR": goes_on(train_equally),
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
    "keras.SAVE_MODEL": refused(save_model, _ALL),
    "keras.SAVE_WEIGHTS": refused(save_weights, _ALL),
    "keras.SAVE_HDF5": refused(save_hdf5, _ALL),
    "keras.APPLY_GRADIENTS": refused(train_sharded, _TORCH),
    "keras.CLIP_GRADIENTS": refused(clip_sharded, _TORCH),
    "keras.RANDOM": refused(draw),
    "keras.REMAT": goes_on(remat),
    "keras.CUSTOM_GRADIENT": goes_on(give_a_gradient),
    "keras.REDUCE_VALUES": refused(mix_examples),
    "keras.STATELESS_SCOPE": goes_on(train_equally),
    "keras.GET_MASK": refused(mask),
    "keras.SET_MASK": refused(mask),
    "keras.SAVE_STATE": goes_on(save_behind),
    "keras.SERIALIZE_MODEL": goes_on(save_behind),
    "keras.WEIGHTS_FILE": goes_on(save_behind),
    "keras.ASSETS_FILE": goes_on(save_behind),
    "keras.FITS_IN_MEMORY": goes_on(save_behind),
    "keras.GET_DATA_ADAPTER": refused(train),
    "keras.SPLIT_ARRAYS": refused(split),
    "keras.ARRAYS": goes_on(train, _ALL),
    "keras.SLICEABLE": goes_on(train, _ALL),
    "keras.EPOCHS_READ": refused(back_up_arrays),
    "keras.GENERATOR": refused(read_a_list),
    "keras.PIPELINE": refused(back_up_a_pipeline),
    "keras.LOADER": refused(back_up_a_loader),
    "keras.GRAIN": refused(back_up_grain),
    "keras.INPUTS_OF_PIPELINE": refused(back_up_a_pipeline),
    "keras.FUNCTIONS_OF_PIPELINE": refused(back_up_a_pipeline),
    "keras.FUNCTIONS_OF_GRAPH": refused(back_up_a_pipeline),
    "keras.SHUFFLE": refused(back_up_a_pipeline),
    "keras.SHUFFLE_SEED": refused(back_up_a_pipeline),
    "keras.SHUFFLE_SECOND_SEED": refused(back_up_a_pipeline),
    "keras.CACHE": refused(back_up_a_pipeline),
    "keras.VARIANT": refused(back_up_a_pipeline),
    "keras.ITERATOR_RESOURCE": refused(back_up_a_pipeline),
    "keras.FLAT_STRUCTURE": refused(share_files, _ALL),
    "torch.MULTIPLY_EACH": goes_on(train_equally),
    "torch.ADD_TO_EACH": goes_on(train_equally),
    "torch.COPY_TO_EACH": goes_on(train_equally),
    "torch.CALL_AFTER_BACKWARD": refused(scale_losses),
    "torch.BATCH_NORM": goes_on(normalize),
    "torch.NORMALIZE_ROWS": goes_on(normalize),
    "torch.REDUCE_NORMALIZED": goes_on(normalize),
    "torch.ARE_TRANSFORMS_ACTIVE": goes_on(normalize),
    "torch.COMPILER_ERROR": goes_on(train_equally),
    "torch.DISPATCH_MODE": refused(compare),
}
