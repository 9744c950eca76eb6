"""Runs that are interrupted and started again: to the last bit those that nothing interrupted."""

import contextlib
import warnings

import numpy as np

from tests.conformance.double import FLOAT64, double_precision
from tests.conformance.interruptions import (
    BATCH,
    BATCHES,
    ROWS,
    InterruptionError,
    arrays,
    exact,
    interrupting,
    network,
    run,
    same,
)
from tests.conformance.lab import fresh, values
from tests.conformance.lazy import kd, keras
from tests.conformance.models import regression
from tests.conformance.registry import case


def scaling_rate(epoch, rate):
    return rate * 0.8


def rate_of(model):
    return float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))


def callbacks_with_plain_state(folder):
    class Rates(keras.callbacks.Callback):
        """Changes the rate as an epoch begins, by draws of its own, and notes all rates."""

        def __init__(self):
            super().__init__()
            self.shown = []
            self.generator = np.random.default_rng(3)

        def on_epoch_begin(self, epoch, logs=None):
            factor = self.generator.uniform(0.9, 1.0)
            self.model.optimizer.learning_rate = rate_of(self.model) * factor

        def on_train_batch_end(self, batch, logs=None):
            self.shown.append((rate_of(self.model), logs["loss"]))

    return [
        keras.callbacks.LearningRateScheduler(scaling_rate),
        Rates(),
        keras.callbacks.EarlyStopping(
            "val_loss", mode="max", patience=5, restore_best_weights=True
        ),
        keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=9.0, cooldown=1),
        keras.callbacks.CSVLogger(folder / "new.csv"),
        keras.callbacks.CSVLogger(folder / "appended.csv", append=True),
        keras.callbacks.TerminateOnNaN(),
    ]


@case("restarts", replicas=(2,))
def callbacks(lab):
    """Callbacks that set the rate, remember weights, or write lines."""
    # Twice in one epoch, and again between a line of its end and the backup of it.
    exact(lab, arrays(), callbacks_with_plain_state, at=(13, 15, 16.5))


@case("restarts", replicas=(2,))
def averages(lab):
    """`SwapEMAWeights` with gradient accumulation, and `ModelCheckpoint` of the best."""

    def build():
        optimizer = keras.optimizers.SGD(
            0.1, momentum=0.5, use_ema=True, gradient_accumulation_steps=2
        )
        return network(optimizer)

    def listed(folder):
        class Best(keras.callbacks.ModelCheckpoint):
            @property
            def shown(self):
                return [self.best]

        return [
            keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
            Best(folder / "w.weights.h5", "val_loss", save_best_only=True, save_weights_only=True),
        ]

    exact(lab, arrays(), listed, build=build)


@case("restarts", replicas=(2,))
def warmup(lab):
    """`LearningRateWarmup`, over more than the first epoch."""
    exact(
        lab,
        arrays(shuffle="batch"),
        lambda folder: [kd.callbacks.LearningRateWarmup(epochs=2.5)],
        build=lambda: network(keras.optimizers.SGD(0.2)),
    )


def tf_data(pipeline, rows=ROWS):
    import tensorflow as tf

    def data():
        tf.random.set_seed(4)
        return {"x": pipeline(tf.data.Dataset.from_tensor_slices(regression(rows)))}

    return data


@case("restarts", replicas=(2,))
def tf_data_shuffled(lab):
    """A `tf.data` pipeline that is shuffled anew in each epoch."""
    exact(lab, tf_data(lambda rows: rows.shuffle(16).batch(BATCH).prefetch(2)))


@case("restarts", replicas=(2,))
def tf_data_repeated(lab):
    """A `tf.data` pipeline that is shuffled, and repeated over the ends of epochs."""
    data = tf_data(lambda rows: rows.shuffle(16).repeat().batch(BATCH).prefetch(2), ROWS - 2)
    exact(lab, data, steps_per_epoch=BATCHES)


def loader(own=False):
    """A shuffling DataLoader's arguments to fit."""
    import torch

    torch.manual_seed(6)  # Keras seeds it on PyTorch alone
    options = {"generator": torch.Generator().manual_seed(8)} if own else {}
    x, y = map(torch.from_numpy, regression(ROWS))
    rows = torch.utils.data.TensorDataset(x, y)
    return {"x": torch.utils.data.DataLoader(rows, batch_size=BATCH, shuffle=True, **options)}


@case("restarts", replicas=(2,))
def data_loader(lab):
    """A `DataLoader` that shuffles, by torch's generator or by one of its own."""
    exact(lab, loader)
    exact(lab, lambda: loader(own=True))


@case("restarts", replicas=(2,))
def py_dataset(lab):
    """A `PyDataset` that shuffles its rows as an epoch ends, by draws of its own."""
    exact(lab, shuffling)


def shuffling():
    """The arguments to fit of a PyDataset that shuffles by itself."""

    class Shuffling(keras.utils.PyDataset):
        def __init__(self):
            super().__init__()
            self.rows, self.targets = regression(ROWS)
            self.order = np.arange(ROWS)
            self.generator = np.random.default_rng(2)

        def __len__(self):
            return BATCHES

        def __getitem__(self, index):
            chosen = self.order[index * BATCH : (index + 1) * BATCH]
            noise = self.generator.normal(size=(BATCH, 4)).astype("float32")
            return self.rows[chosen] + noise, self.targets[chosen]

        def on_epoch_end(self):
            self.generator.shuffle(self.order)

    return {"x": Shuffling(), "shuffle": False}


@case("restarts", replicas=(2,))
def generator(lab):
    """A generator, which has to pass over the batches of all epochs."""

    def batches():
        x, y = regression(ROWS)
        while True:
            chosen = np.random.randint(ROWS, size=BATCH)
            yield x[chosen], y[chosen]

    exact(lab, lambda: {"x": batches()}, steps_per_epoch=BATCHES)


@case("restarts", replicas=(2,))
def as_many_steps_as_batches(lab):
    """Arrays with `steps_per_epoch`, which Keras begins again as an epoch ends."""
    exact(lab, arrays(), at=(8.5, 13), steps_per_epoch=BATCHES)


@case("restarts", replicas=(2,), backends=("torch",))
def as_many_steps_as_batches_of_other_data(lab):
    """The same of a `DataLoader` and a `PyDataset`; fewer steps are said to be lost."""
    for of in (loader, lambda: loader(own=True), shuffling):
        exact(lab, of, at=(8.5, 13), steps_per_epoch=BATCHES)
    exact(lab, arrays(), at=(), lost=["steps_per_epoch=4"], steps_per_epoch=4)


@case("restarts", replicas=(2,))
def several_steps(lab):
    """Three steps in an execution, of which the last one of an epoch has two."""
    build = lambda: network(steps_per_execution=3)  # noqa: E731
    exact(lab, arrays(), at=(9, 14, 16.5), build=build)


@case("restarts", replicas=(2,))
def stopped_already(lab):
    """A run that EarlyStopping has stopped, and that dies as it ends, trains no further."""

    class Dying(keras.callbacks.Callback):
        def __init__(self, dies):
            super().__init__()
            self.dies = dies

        def on_train_end(self, logs=None):
            if self.dies:
                raise InterruptionError

    def listed(dies):
        stop = keras.callbacks.EarlyStopping(
            "loss", patience=0, min_delta=9.0, restore_best_weights=True
        )
        return lambda folder: [Dying(dies), stop]

    with lab.folder() as one, lab.folder() as other:
        expected = run(lab, one, arrays(), listed(False), epochs=5)
        with contextlib.suppress(InterruptionError):
            run(lab, other, arrays(), listed(True), epochs=5)
        found = run(lab, other, arrays(), listed(False), epochs=5)
    lab.equal(found["epochs"], [0, 1])
    lab.check(same(found, expected), f"{found} instead of {expected}")


@case("restarts", replicas=(2,))
def said(lab):
    """What cannot be brought back is in one warning; `state_dict` brings back the hidden."""

    class Hidden:
        """Holds a number where nobody looks."""

        __slots__ = ("number",)

        def __init__(self):
            self.number = 0

    class Counting(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.hidden = Hidden()

        def on_train_batch_end(self, batch, logs=None):
            self.hidden.number += 1

        @property
        def shown(self):
            return self.hidden.number

    class Saying(Counting):
        def state_dict(self):
            return {"number": self.hidden.number}

        def load_state_dict(self, state):
            self.hidden.number = state["number"]

    exact(lab, arrays(), lambda folder: [Saying()], at=(13,))
    seen = []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch))
    with lab.folder() as folder, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(lab, folder, arrays(), lambda folder: [Counting(), note])
        messages = [str(one.message) for one in told if "cannot bring back" in str(one.message)]
        messages = lab.everyone(messages)[0]
    lab.check(len(messages) == 1, f"{len(messages)} warnings")
    for part in ("Counting.hidden (Hidden)", "LambdaCallback: seen (list)", "state_dict()"):
        lab.check(part in messages[0], f"{part!r} is not in {messages[0]!r}")


@case("restarts", replicas=(2,))
def on_twice_as_many_replicas(lab):
    """Interrupted on 2 replicas, and gone on with 4: the untouched run, but for rounding."""

    def build():
        layers = keras.layers
        norm = layers.BatchNormalization(momentum=0.5)
        model = keras.Sequential(
            [keras.Input((4,)), layers.Dense(4, "tanh"), norm, layers.Dense(1)]
        )
        model.compile(keras.optimizers.Adam(), "mse", metrics=["mae"])
        return model

    more, options = lab.with_replicas(2 * lab.replicas), {"build": build, "epochs": 2}
    with double_precision(lab.backend), lab.folder() as whole, lab.folder() as torn:
        expected = run(lab, whole, arrays(), **options)
        with contextlib.suppress(InterruptionError):
            run(lab, torn, arrays(), at=7, **options)
        lab.equal(expected, run(more, torn, arrays(), **options), FLOAT64)


@case("restarts", replicas=(2,))
def two_calls_of_fit(lab):
    """A script that calls `fit` twice with one folder, and dies in the second call."""

    def script(folder, at=None):
        _forget_earlier_calls()
        fresh()
        with lab.strategy().scope():
            model = network()
        kept = []
        for struck in (None, at):
            callbacks = [kd.callbacks.BackupAndRestore(folder, save_freq=3)]
            callbacks += [interrupting(struck)] if struck else []
            arguments = {**arrays()(), "epochs": 2, "verbose": 0, "callbacks": callbacks}
            kept.append(model.fit(**arguments).history)
        return [kept, values(model.variables)]

    with lab.folder() as one, lab.folder() as other, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        expected = script(one)
        with contextlib.suppress(InterruptionError):
            script(other, at=13)
        found = script(other)
        messages = [str(one.message) for one in told if "a later call of fit" in str(one.message)]
        messages = lab.everyone(messages)[0]
    lab.check(same(found, expected), f"{found} instead of {expected}")
    lab.check(len(messages) == 1, f"{messages}")


def _forget_earlier_calls():
    """As a new process does."""
    from kerasdist.callbacks import run_files

    run_files._ENDED.clear()
