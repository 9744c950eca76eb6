"""Functions that use what internals are for; `tests.versions.features` says which is for which.

They run in a process, on one worker or several, where the internal is gone. A use that is refused
there ends in a `VersionError`; one that goes on looks at what happens in place of the feature.
"""

import contextlib
import functools
import os
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np


class Here:
    """What a feature's function has; as a worker of two, a strategy of both."""

    def __init__(self, *, is_worker: bool):
        self.is_worker = is_worker
        self.x, self.y = rows()

    @functools.cached_property
    def kd(self) -> ModuleType:
        import kerasdist

        return kerasdist

    @functools.cached_property
    def keras(self) -> ModuleType:
        import keras

        return keras

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

    def sequential(self, layers: Callable[[Any], list[Any]], *inputs: int, **options: Any) -> Any:
        """A model of the strategy, of layers made in its scope; options are `compile`'s."""
        keras = self.keras
        with self.strategy.scope():
            model = keras.Sequential([keras.Input(inputs or (3,)), *layers(keras.layers)])
            model.compile(**{"optimizer": "sgd", "loss": "mse", **options})
        return model

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a function in replicas, as custom loops do."""
        with self.strategy.scope():
            return self.strategy.run(function, arguments)

    def fit(self, model: Any, **options: Any) -> list[float]:
        return fit(model, self.x, self.y, **options)


def dense(keras: ModuleType, **options: Any) -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.layers[0].set_weights([np.linspace(-1, 1, 6).reshape(3, 2), np.array([0.5, -0.5])])
    model.compile(**{"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", **options})
    return model


def rows() -> tuple[np.ndarray, np.ndarray]:
    x = np.sin(np.arange(24, dtype="float32")).reshape(8, 3)
    return x, x[:, :2] * 0.5 + 1


def fit(model: Any, x: np.ndarray, y: np.ndarray, **options: Any) -> list[float]:
    """The losses of two epochs, and the weights behind them; the last batch is a ragged one."""
    history = model.fit(x[:7], y[:7], batch_size=4, epochs=2, shuffle=False, verbose=0, **options)
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


def train_sharded(here: Here, **options: Any) -> Any:
    with here.strategy_of(sharding=here.kd.Sharding("full", min_size=1)).scope():
        model = dense(here.keras, **options)
    here.fit(model)
    return model


def train_by_a_map(here: Here):
    distribution = here.keras.distribution
    mesh = distribution.DeviceMesh((1, 2), ("batch", "model"), ["cpu:0", "cpu:1"])
    layouts = distribution.LayoutMap(mesh)
    layouts[".*wide/kernel"] = (None, "model")
    layouts[".*wide/output"] = (None, "model")
    with here.strategy_of(sharding=layouts).scope():
        layers = [here.keras.layers.Dense(4, name="wide"), here.keras.layers.Dense(2)]
        model = here.keras.Sequential([here.keras.Input((3,)), *layers])
        model.compile("sgd", "mse")
    here.fit(model)


def clip_sharded(here: Here):
    train_sharded(here, optimizer=here.keras.optimizers.SGD(0.1, global_clipnorm=0.1))


def train_outside(here: Here):
    """Trains in a process without a job, in which Keras wraps nothing."""
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


def mix_examples(here: Here):
    here.fit(here.model(loss=here.keras.losses.Dice()))


def split(here: Here):
    here.model().fit(here.x, here.y, validation_split=0.5, verbose=0)


def read_a_list(here: Here):
    batches = [(here.x[:4], here.y[:4]), (here.x[4:], here.y[4:])]
    here.model().fit(here.strategy.distribute_dataset(batches), verbose=0)


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


def scale_losses(here: Here):
    optimizer = here.keras.optimizers.LossScaleOptimizer(here.keras.optimizers.SGD(0.1))
    here.fit(here.model(optimizer=optimizer))


def add_losses(here: Here):
    keras = here.keras

    class Penalty(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(keras.ops.mean(keras.ops.square(x)))
            return x

    here.fit(here.sequential(lambda layers: [Penalty(), layers.Dense(2)]))


def reduce_a_loss_in_a_replica(here: Here):
    loss = here.keras.losses.MeanSquaredError()
    here.run(lambda: loss(here.y[:4], here.y[4:8]))


def mask_with_weights(here: Here):
    loss = here.keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model = here.sequential(lambda layers: [layers.Masking(), layers.Dense(1)], 3, 1, loss=loss)
    x = here.x[:, :, None]
    model.fit(x, x, sample_weight=np.ones((8, 3), "float32"), batch_size=4, verbose=0)


def normalize(here: Here):
    here.fit(here.sequential(lambda layers: [layers.BatchNormalization(), layers.Dense(2)]))


def normalize_in_a_replica(here: Here):
    with here.strategy.scope():
        layer = here.keras.layers.BatchNormalization()
        layer.build((None, 3))
    here.run(lambda: layer(here.x, training=True))


def normalize_by_a_layer_from_outside(here: Here):
    layer = here.keras.layers.BatchNormalization()
    layer.build((None, 3))
    here.run(lambda: layer(here.x, training=True))


def draw(here: Here):
    here.fit(here.sequential(lambda layers: [layers.Dropout(0.5, seed=1), layers.Dense(2)]))


def draw_in_a_replica(here: Here):
    here.run(lambda: here.keras.random.normal((2,)))


def remat(here: Here):
    with here.keras.RematScope(mode="full"):
        model = here.sequential(lambda layers: [layers.Dense(2)])
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

    here.fit(here.sequential(lambda layers: [layers.Dense(2), Double()]))


def mask(here: Here):
    """Of a loss that mixes the examples of the replicas, and so their masks."""
    model = here.sequential(
        lambda layers: [layers.Masking(), layers.SimpleRNN(2, return_sequences=True)],
        *(3, 1),
        loss=here.keras.losses.Dice(),
    )
    model.fit(here.x[:, :, None], here.x[:, :, None] * np.ones(2, "float32"), verbose=0)


def mix_precisions(here: Here):
    """By what Keras does not read itself: shards, and in a scope inside of a replica's."""
    here.keras.config.set_dtype_policy("mixed_bfloat16")
    if here.is_worker:
        train_sharded(here)(here.x)
        return
    layer = here.model().layers[0]

    def step() -> Any:
        with here.keras.StatelessScope():
            return layer(here.x)

    here.run(step)


def build_in_a_step(here: Here):
    with here.strategy.scope():
        layer = here.keras.layers.Dense(2)
    here.run(lambda: layer(here.x))


def measure_in_a_step(here: Here):
    """The metric makes its variables in the step; their values are sums over the replicas."""
    with here.strategy.scope():
        metric = here.keras.metrics.AUC(multi_label=True)
    here.run(lambda: metric.update_state(here.y > 1, here.keras.ops.sigmoid(here.y)))


def measure_in_the_users_way(here: Here):
    """By a metric from outside of the scope, of whose state nobody knows that it is a sum."""
    keras = here.keras

    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__()
            self.largest = self.add_variable((), "zeros", name="largest")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None):
            del y_true, sample_weight
            self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(y_pred)))

        def result(self) -> Any:
            return self.largest + 0

    here.fit(here.model(metrics=[Largest()]))


def measure(here: Here):
    here.fit(
        here.model(
            metrics=[here.keras.metrics.MeanMetricWrapper(here.keras.losses.mean_squared_error)]
        )
    )


def flatten_values_of_replicas(here: Here):
    found = here.run(lambda: here.keras.ops.ones((2,)))
    here.keras.tree.map_structure(lambda leaf: leaf, found)


def optimize_all(here: Here):
    keras = here.keras
    with here.strategy.scope():
        weights = here.model().trainable_variables
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(weights)
    here.run(lambda: optimizer.apply([keras.ops.ones(one.shape) for one in weights]))


def optimize_from_outside(here: Here):
    """By an optimizer that was built there, with what it keeps of each weight."""
    keras = here.keras
    layer, optimizer = keras.layers.Dense(2), keras.optimizers.SGD(0.1, momentum=0.5)
    layer.build((None, 3))
    optimizer.build(layer.trainable_variables)
    here.fit(here.sequential(lambda _: [layer], optimizer=optimizer))


def share_files(here: Here):
    model = here.model()
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
        model.fit(pairs, verbose=0)


def save_behind(here: Here):
    """Without the internal it is written at once, and a warning says so."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callback = here.kd.callbacks.ModelCheckpoint(f"{folder}/model.keras", save="async")
        here.fit(here.model(), callbacks=[callback])
        assert any("saves at once" in str(one.message) for one in caught), caught
        assert here.keras.saving.load_model(f"{folder}/model.keras")


def save_behind_on_other_storage(here: Here):
    """TensorFlow has one in the memory of a process."""
    callback = here.kd.callbacks.ModelCheckpoint("ram://folder/model.keras", save="async")
    here.fit(here.model(), callbacks=[callback])


def restore_the_best(here: Here):
    """A second `fit` goes on with what the first has found out of the best epoch."""
    with tempfile.TemporaryDirectory() as folder:
        for epochs in (1, 2):
            best = here.keras.callbacks.ModelCheckpoint(
                f"{folder}/best.keras", monitor="loss", save_best_only=True
            )
            back_up = here.kd.callbacks.BackupAndRestore(
                f"{folder}/backup", delete_checkpoint=False
            )
            model = here.model()
            model.fit(here.x, here.y, epochs=epochs, callbacks=[best, back_up], verbose=0)


def watch(here: Here):
    with tempfile.TemporaryDirectory() as folder:
        here.fit(here.model(), callbacks=[here.kd.callbacks.Telemetry(folder)])


def profile(here: Here):
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(KERASDIST_PROFILE="1:2", KERASDIST_PROFILE_DIR=folder)
        here.fit(here.model())


def compare(here: Here):
    keras = here.keras

    class Noisy(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x + 0 * keras.random.normal(keras.ops.shape(x), seed=1)

    model = here.sequential(lambda layers: [Noisy(), layers.Dense(2)])
    found = here.kd.compare_with_one_device(model, here.x, here.y)
    assert found.equal, found


# ------------------------------------------------------------------------------ on a backend alone


def describe_a_tpu(here: Here):
    from kerasdist.backends.jax.ahead_of_time import described_devices
    from kerasdist.core.hardware import parse_target

    described_devices(parse_target("v5e:2x2"))


def change_buffers(here: Here):
    """A layer has a buffer of torch, which no step may change."""
    import torch

    class Shift(here.keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.register_buffer("shift", torch.ones(()))

        def call(self, x: Any) -> Any:
            return x + self.shift

    here.fit(here.sequential(lambda layers: [Shift(), layers.Dense(2)]))


def run(here: Here):
    here.run(lambda: here.keras.ops.ones((2,)))


def run_in_a_function(here: Here):
    """AutoGraph converts the code that replicas run."""
    import tensorflow as tf

    def step(x: Any) -> Any:
        return 2 * x if tf.reduce_sum(x) > 0 else x

    with here.strategy.scope():
        found = tf.function(lambda: here.strategy.run(step, (tf.ones(2),)))()
    assert here.strategy.reduce("sum", found, axis=0) == 8


def run_a_function(here: Here):
    import tensorflow as tf

    here.run(tf.function(lambda: tf.ones(2)))


def run_in_xla(here: Here):
    import tensorflow as tf

    with contextlib.suppress(tf.errors.OpError, ValueError, here.kd.errors.UnsupportedError):
        tf.function(lambda: here.run(lambda: tf.ones(2)), jit_compile=True)()


def train_by_a_function(here: Here, **options: Any):
    import tensorflow as tf

    class Own(here.keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = here.keras.layers.Dense(2)

        def call(self, x: Any) -> Any:
            return self.dense(x)

        @tf.function(**options)
        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    with here.strategy.scope():
        model = Own()
        model.compile("sgd", "mse")
    here.fit(model)


def train_by_a_function_in_xla(here: Here):
    train_by_a_function(here, jit_compile=True)


def look_up_eagerly(here: Here):
    def layers(of: Any) -> list[Any]:
        return [of.Embedding(4, 2), of.Flatten()]

    model = here.sequential(layers, 3, run_eagerly=True)
    model.fit(np.arange(24).reshape(8, 3) % 4, np.ones((8, 6), "float32"), verbose=0)


def make_a_second_strategy(here: Here):
    here.run(lambda: here.keras.ops.ones((2,)))
    here.strategy_of()


def broadcast(here: Here):
    import tensorflow as tf

    here.strategy.extended.broadcast_to(tf.ones(2), here.strategy)


def read_by_pipelines(here: Here):
    import tensorflow as tf

    each = here.kd.InputOptions(
        experimental_replication_mode=here.kd.InputReplicationMode.PER_REPLICA
    )
    here.strategy.distribute_datasets_from_function(
        lambda _: tf.data.Dataset.from_tensor_slices((here.x, here.y)).batch(2), each
    )


def convert_variables(here: Here):
    """As TensorFlow has it, they are always true."""
    with here.strategy.scope():
        variable = here.keras.Variable(0.0)
    assert bool(variable.value)


def train_in_modes(here: Here):
    """Modes of the code around `fit` hold in the first replica at least."""
    import torch
    from torch.overrides import TorchFunctionMode

    threads = []

    class Notes(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
            threads.append(threading.get_ident())
            return function(*args, **(kwargs or {}))

    same = lambda tensor: tensor  # noqa: E731
    with Notes(), torch.autograd.graph.saved_tensors_hooks(same, same):
        here.fit(here.model())
    assert threading.get_ident() in threads
