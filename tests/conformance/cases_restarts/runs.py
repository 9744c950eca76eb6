"""What runs on from a backup is, to the last bit, the run that nothing interrupted."""

import contextlib
import itertools

import numpy as np

from tests.conformance import steps
from tests.conformance.double import FLOAT64, double_precision
from tests.conformance.interruptions import (
    BATCH,
    ROWS,
    InterruptionError,
    arrays,
    exact,
    interrupting,
    network,
    run,
    same,
    with_chosen_interval,
)
from tests.conformance.lab import fresh, values
from tests.conformance.lazy import kd, keras
from tests.conformance.models import largest_error, regression, stack
from tests.conformance.registry import case
from tests.environment import everything


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


@case("restarts", replicas=(2,), like="restarts.averages")
def callbacks(lab):
    """Callbacks that set the rate, remember weights, or write lines; `LearningRateWarmup`."""
    # Twice in one epoch, and again between a line of its end and the backup of it.
    exact(lab, arrays(), callbacks_with_plain_state, at=(13, 15, 16.5))
    # The rate grows over more than the first epoch.
    exact(
        lab,
        arrays(shuffle="batch"),
        lambda folder: [kd.callbacks.LearningRateWarmup(epochs=2.5)],
        build=lambda: network(keras.optimizers.SGD(0.2)),
    )


@case("restarts", replicas=(2,))
def averages(lab):
    """`SwapEMAWeights` with accumulation, `ModelCheckpoint` of the best, a metric of one's own."""

    def build():
        optimizer = keras.optimizers.SGD(
            0.1, momentum=0.5, use_ema=True, gradient_accumulation_steps=2
        )
        return network(optimizer, metrics=["mae", largest_error()])

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
def two_optimizers(lab):
    """Two optimizers in one `train_step`: both go on, the one that the first step builds, too."""

    def build():
        model = steps.of(lab.backend).two_optimizer_model()()
        model.compile(keras.optimizers.SGD(0.05))
        model.build((None, 4))
        if lab.backend != "jax":  # whose steps begin with all state
            model.judge_optimizer = keras.optimizers.Adam(0.05)
        return model

    x, y = regression(ROWS)
    exact(lab, lambda: {"x": x, "y": y, "batch_size": BATCH}, build=build)


@case("restarts", replicas=(2,))
def one_device(lab):
    """A run on one device, with metrics that go on in the middle of an epoch."""
    build = lambda: network(metrics=["mae", keras.metrics.RootMeanSquaredError()])  # noqa: E731
    exact(lab, arrays(), build=build, strategy=lambda: kd.OneDeviceStrategy("cpu:0"))


@case("restarts", replicas=(2,))
def several_steps(lab):
    """Three steps in an execution, of which the last one of an epoch has two."""
    build = lambda: network(steps_per_execution=3)  # noqa: E731
    exact(lab, arrays(), at=(9, 14, 16.5) if everything() else (9, 16.5), build=build)


@case("restarts", replicas=(2,), like="restarts.py_dataset")
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


@case("restarts", replicas=(2,), like="restarts.averages")
def said(lab):
    """What cannot be brought back is in one warning; `state_dict` brings back the hidden."""

    class Hidden:
        """Holds a number that no backup knows of."""

        __slots__ = ("number",)

        def __init__(self):
            self.number = 0

    class Counting(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.hidden = Hidden()
            self.built_late = keras.metrics.F1Score()

        def on_train_batch_end(self, batch, logs=None):
            self.hidden.number += 1
            self.built_late.update_state(np.ones((1, 2)), np.ones((1, 2)))

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

    class Freezing(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.layers[1].trainable = False  # it has no weights

    listed = lambda folder: [Counting(), note, Freezing()]  # noqa: E731
    with lab.folder() as folder:
        with lab.told("cannot bring back") as told, contextlib.suppress(InterruptionError):
            run(lab, folder, arrays(), listed, at=13)
        messages = lab.everyone(told)[0]
        run(lab, folder, arrays(), listed)
    lab.check(len(messages) == 1, f"{len(messages)} warnings")
    hidden = "Counting.hidden (Hidden)", "built_late (F1Score)", "LambdaCallback: seen (list)"
    for part in (*hidden, "which layers are trainable", "state_dict()"):
        lab.check(part in messages[0], f"{part!r} is not in {messages[0]!r}")


@case("restarts", replicas=(2,))
def on_twice_as_many_replicas(lab):
    """Interrupted on 2 replicas, and gone on with 4: the untouched run, but for rounding."""

    def build():
        layers = keras.layers
        norm = layers.BatchNormalization(momentum=0.5)
        return stack(
            [layers.Dense(4, "tanh"), norm, layers.Dense(1)],
            keras.optimizers.Adam(),
            metrics=["mae"],
        )

    more, options = lab.with_replicas(2 * lab.replicas), {"build": build, "epochs": 2}
    with double_precision(lab.backend), lab.folder() as whole, lab.folder() as torn:
        expected = run(lab, whole, arrays(), **options)
        with contextlib.suppress(InterruptionError):
            run(lab, torn, arrays(), at=7, **options)
        lab.equal(expected, run(more, torn, arrays(), **options), FLOAT64)


@case("restarts", replicas=(2,))
def two_calls_of_fit(lab):
    """A script that calls `fit` twice with one folder, and dies in the second call."""
    from kerasdist.callbacks.backup import run_files

    def script(folder, at=None):
        run_files._ENDED.clear()  # as in a new process
        fresh()
        model = lab.made(network)
        kept = []
        for struck in (None, at):
            callbacks = [kd.callbacks.BackupAndRestore(folder, save_freq=3)]
            callbacks += [interrupting(struck)] if struck else []
            arguments = {**arrays()(), "epochs": 2, "verbose": 0, "callbacks": callbacks}
            kept.append(model.fit(**arguments).history)
        return [kept, values(model.variables)]

    with lab.folder() as one, lab.folder() as other, lab.told("a later call of fit") as told:
        expected = script(one)
        with contextlib.suppress(InterruptionError):
            script(other, at=13)
        found = script(other)
        messages = lab.everyone(told)[0]
    lab.check(same(found, expected), f"{found} instead of {expected}")
    lab.check(len(messages) == 1, f"{messages}")


# The clock of this test goes on by a second each time that it is read. So the five batches between
# the compiled ones and the end of the first epoch take 0.2 s each, and a backup a second. By the
# formula there is one second, or five batches, between two backups, if failures come as often.
CHOSEN = {"save_freq": "auto", "hours_between_failures": 1.35 / 3600}


# The interval is chosen by no backend.
@case("restarts", replicas=(2,), like="restarts.several_steps")
def auto(lab):
    """`save_freq="auto"`: an interrupted run backs up where the other does, and is equal to it."""
    # The end of the first epoch shows what a backup takes; those of the others come three
    # batches after a backup, more than half of five.
    expected, found = with_chosen_interval(
        lab,
        lambda folder, at: run(lab, folder, arrays(), at=at, backups=CHOSEN.items()),
        itertools.count().__next__,
        [(1, 0), (1, 0), (1, 5), (2, 0), (2, 5), (3, 0)],
        ((7, []), (14, [(1, 0), (1, 0), (1, 5)]), (22, [(2, 0), (2, 5)])),
    )
    for name, one in expected.items():
        lab.check(same(found[name], one), f"{name}: {found[name]} instead of {one}")
