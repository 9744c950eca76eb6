"""`kd.config.set_most_examples_at_once`: the numbers of one device that has the batch at once."""

import contextlib
import logging
from unittest import mock

import numpy as np

from tests.conformance.actions import fit, used
from tests.conformance.cases_float64 import doubles, in_double, train_and_test
from tests.conformance.cases_random import draws_for_the_global_batch
from tests.conformance.double import FLOAT64
from tests.conformance.lab import SEED, fresh, logged
from tests.conformance.lazy import jax, kd, keras, tf, torch
from tests.conformance.models import STEPS_IN_TIME, VOCABULARY, compiled, regression, stack, tokens
from tests.conformance.registry import case

# Batches of 7 and 4 rows on 3 replicas: of 3, 2, 2 and 2, 1, 1 rows.
N, MOST = 11, 2
EVERYWHERE = (1, 3)


@contextlib.contextmanager
def at_once(most=MOST):
    kd.config.set_most_examples_at_once(most)
    try:
        yield
    finally:
        kd.config.set_most_examples_at_once(None)


def noting(seen, **options):
    class Noting(keras.layers.Layer):
        def call(self, x):
            if keras.backend.backend() != "tensorflow":
                seen.append(x.shape[0])
                return x
            noted = tf.numpy_function(lambda rows: seen.append(len(rows)), [x], [])
            with tf.control_dependencies([noted]):
                return tf.identity(x)

    return Noting(**options)


@case("passes", replicas=EVERYWHERE)
@in_double
def dense_layers(lab):
    """Clipping, momentum, metrics, regularizers: computed in passes, as one device does at once."""
    x, y = doubles(N)
    seen = []

    def build():
        layers = [keras.layers.Dense(6, "tanh", kernel_regularizer="l2"), noting(seen)]
        return stack(
            [*layers, keras.layers.Dense(1)],
            keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5),
            metrics=["mae", keras.metrics.RootMeanSquaredError()],
            weighted_metrics=["mse", keras.metrics.R2Score()],
        )

    with at_once():
        model = lab.made(build)
        model.fit(x, y, batch_size=7, verbose=0)
        seen.clear()  # calls by the check of the first batch, or by building
        model.fit(x, y, batch_size=8, verbose=0)
        # On JAX a program's rows are those of all replicas.
        most = MOST * (lab.replicas if keras.backend.backend() == "jax" else 1)
        lab.check(seen and max(seen) <= most, f"{seen} rows, and {most} at once")
        weights = np.linspace(0.5, 2.0, N)
        train_and_test(lab, build, x, y, sample_weight=weights)


@case("passes", replicas=EVERYWHERE)
@in_double
def masks(lab):
    """Tables of tokens and places, masks, losses of each step in time, summed over the batch."""
    x = tokens(N)

    def build():
        class Places(keras.layers.Layer):
            def __init__(self):
                super().__init__()
                self.supports_masking = True
                self.table = keras.layers.Embedding(STEPS_IN_TIME, 4)

            def call(self, x):
                return x + self.table(keras.ops.arange(STEPS_IN_TIME))

        inputs = keras.Input((STEPS_IN_TIME,), dtype="int32")
        words = keras.layers.Embedding(VOCABULARY, 4, mask_zero=True)
        recurrent = keras.layers.LSTM(3, return_sequences=True)
        layers = [words, Places(), recurrent, keras.layers.Dense(VOCABULARY)]
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.Adam(0.01)
        return stack(layers, optimizer, loss, inputs, weighted_metrics=["accuracy"])

    with at_once():
        lab.same(build, *used(x, x, 7, epochs=2), tolerance=FLOAT64)


@case("passes", replicas=EVERYWHERE)
@in_double
def a_loss_of_the_whole_batch(lab):
    """The user's own `train_step`, several inputs and outputs, a loss with reduction `sum`."""
    x, y = doubles(N)

    def build():
        first, second = keras.Input((4,)), keras.Input((4,))
        hidden = keras.layers.Dense(5, "tanh")(keras.layers.Concatenate()([first, second]))
        outputs = {"a": keras.layers.Dense(1, name="a")(hidden), "b": hidden}

        class Model(keras.Model):
            def train_step(self, *given):
                return super().train_step(*given)

        model = Model([first, second], outputs)
        losses = {"a": keras.losses.MeanSquaredError(reduction="sum"), "b": None}
        return compiled(model, keras.optimizers.Adam(0.01), losses)

    with at_once():
        lab.same(
            build, fit([x, x], {"a": y}, batch_size=7, epochs=2, shuffle=False), tolerance=FLOAT64
        )


REFUSED = ("UnsupportedError", "a call that changes variable=.*seed")
DRAWS = {"jax": REFUSED, "tensorflow": REFUSED}


@case("passes", replicas=(2,), refused=DRAWS)
def dropout(lab):
    """The backward pass drops the units that the forward pass has dropped, and a seed fixes both.

    What is kept is 2, its loss 4, and its gradient 8 for the weight that was added before.
    """
    x = np.ones((8, 6), "float32")

    def build():
        class Weights(keras.layers.Layer):
            def build(self, shape):
                self.w = self.add_weight(shape=(shape[-1],), initializer="zeros")

            def call(self, x):
                return x + self.w

        layers = [Weights(), keras.layers.Dropout(0.5)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        return compiled(model, keras.optimizers.SGD(1.0), lambda y, p: keras.ops.sum(p * p, -1))

    with at_once():
        first, second = (
            lab.run(build, [fit(x, x, batch_size=8, epochs=1)], lab.strategy())[1] for _ in "ab"
        )
    lab.equal(first.parts(True), second.parts(True))
    [loss] = first.results[0]["history"]["history"]["loss"]
    lab.check(loss > 0, f"loss {loss}")
    lab.equal([loss], [-first.weights[0].sum() / 2])


@case("passes", replicas=(1,))
def what_a_pass_cannot_know(lab):
    """BatchNormalization, what layers add, count or keep, seeds, global draws: refused."""
    x, y = regression(8)

    class Adding(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.mean(x))
            return x

    class Counting(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.count = keras.metrics.Sum(name="count")

        def call(self, x):
            self.count.update_state(x)
            return x

    class Keeping(keras.layers.Layer):
        def call(self, x):
            self.kept = x
            return x

    layers = {
        "normalizes by the whole": keras.layers.BatchNormalization,
        "activity_regularizer": lambda: keras.layers.Dense(4, activity_regularizer="l2"),
        "adds a loss": Adding,
        "changes variable": lambda: keras.layers.Dropout(0.5, seed=3),
    }
    if lab.backend != "jax":  # where Keras updates no metric in a call, and no tensor outlives it
        layers["metric" if lab.backend == "tensorflow" else "count"] = Counting
    if lab.backend == "torch":
        layers["keeps a tensor"] = Keeping

    def trained(make, loss="mse", **options):
        model = lab.made(lambda: stack([make(), keras.layers.Dense(1)], "sgd", loss, **options))
        model.fit(x, y, batch_size=8, verbose=0)

    with at_once():
        for words, make in layers.items():
            with lab.raises(kd.errors.UnsupportedError, words):
                trained(make)
        with draws_for_the_global_batch(), lab.raises(kd.errors.UnsupportedError, "set_draws"):
            trained(lambda: keras.layers.Dropout(0.5))

        with lab.raises(Exception, "outputs? of"):
            trained(
                lambda: keras.layers.Lambda(lambda x: keras.ops.reshape(x, (-1, 1))),
                loss=lambda y, p: keras.ops.mean(keras.ops.square(p)),
            )
        if lab.backend != "jax":
            with lab.raises(kd.errors.UnsupportedError, "jit_compile"):
                trained(lambda: keras.layers.Dense(4), jit_compile=True)

        def frozen():
            layer = keras.layers.BatchNormalization()
            layer.trainable = False
            return layer

        trained(frozen)


def is_chief(lab):
    return not hasattr(lab, "job") or lab.job.is_chief


def limited(lab, most):
    """A device with memory for so many rows; of several workers the last one's.

    It raises the framework's own error: on TensorFlow in the graph, on JAX while XLA compiles.
    """
    is_limited = kd.has_strategy() and getattr(lab, "is_last", True)

    class Limited(keras.layers.Layer):
        def call(self, x, training=False):
            if not (training and is_limited):
                return x
            if lab.backend == "tensorflow":
                noted = tf.numpy_function(self.require, [tf.shape(x)[0]], [])
                with tf.control_dependencies([] if noted is None else [noted]):
                    return tf.identity(x)
            if lab.backend == "jax" and len(x) > most * lab.replicas:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
            if lab.backend == "torch" and x.device.type != "meta" and len(x) > most:
                raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
            return x

        def require(self, rows):
            if rows > most:
                raise MemoryError("Out of memory")  # for TensorFlow a ResourceExhaustedError

    return Limited()


@case("passes", replicas=EVERYWHERE)
@in_double
def found(lab):
    """`"auto"`: as many examples at once as every device has memory for, halved until they fit."""
    x, y = doubles(14)

    def build():
        return stack(
            [keras.layers.Dense(6, "tanh"), limited(lab, MOST), keras.layers.Dense(1)],
            keras.optimizers.Adam(0.01, clipnorm=0.5),
            metrics=["mae", keras.metrics.RootMeanSquaredError()],
        )

    small, train = fit(x[:4], y[:4], batch_size=2), fit(x, y, batch_size=7, epochs=2)
    arrays = lambda model: model.train_on_batch(x[:7], y[:7])  # noqa: E731
    with at_once("auto"), logged(logging.INFO) as lines:
        strategy = lab.strategy(check="off")
        lab.same(build, small, train, arrays, tolerance=FLOAT64, strategy=strategy)
    lines = [one for one in lines if "at a time" in one]
    said = f": 2 examples at a time, of {-(-7 // lab.replicas)} on a replica"
    lab.check(len(lines) == is_chief(lab) and all(said in one for one in lines), f"{lines}")


@case("passes", replicas=(2,))
def nothing_left(lab):
    """What was tried to find a number leaves nothing: seeds, statistics, counts in Python."""
    x, y = regression(11)

    def build():
        class Counting(keras.layers.Layer):
            def __init__(self):
                super().__init__()
                self.calls = 0
                self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False)

            def call(self, x):
                self.calls += 1
                self.seen.assign_add(1.0)
                return x * (1.0 + 0.1 * self.calls * (lab.backend == "torch"))

        layers = [keras.layers.Dense(6), Counting(), keras.layers.Dropout(0.5, seed=3)]
        noise = keras.layers.GaussianNoise(0.1)
        optimizer = keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5)
        return stack([*layers, noise, keras.layers.Dense(1)], optimizer, metrics=["mae"])

    def outcome():
        return lab.run(build, [fit(x, y, batch_size=8, epochs=2)], lab.strategy())[1].parts(True)

    expected = outcome()
    with at_once("auto"):
        lab.equal(expected, outcome())


@case("passes", replicas=(1, 2))
def not_found(lab):
    """No memory for one example: the framework's error, with a note; what no pass can know, too."""
    x, y = regression(8)

    def trained(most, layer):
        build = lambda: stack([keras.layers.Dense(4), limited(lab, most), layer()], "sgd")  # noqa: E731
        lab.made(build).fit(x, y, batch_size=8, verbose=0)

    def error_of(*given):
        try:
            with at_once("auto"):
                trained(*given)
        except Exception as error:  # noqa: BLE001 (a framework's own)
            return error
        return None

    error = error_of(0, lambda: keras.layers.Dense(1))
    kinds = ("OutOfMemoryError", "JaxRuntimeError", "ResourceExhaustedError", "ReplicaError")
    lab.check(type(error).__name__ in kinds, f"{error!r}")
    said = [str(error), *getattr(error, "__notes__", ())]
    lab.check("one example" in "".join(said) or "on trial" in said[0], f"{said}")
    error = error_of(1, lambda: keras.layers.Dropout(0.5, seed=3))
    lab.check("UnsupportedError" in f"{error!r}", f"{error!r}")
    lab.check("changes variable" in str(error), f"{error!r}")


@case("passes", replicas=(2,))
def kept_in_a_backup(lab):
    """A backup keeps the number that was found, for a restart with as many replicas."""
    x, y = regression(16)

    class Interruption(Exception):
        pass

    class Stopping(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise Interruption

    def run(folder, strategy, stops):
        fresh()
        keras.utils.set_random_seed(SEED)
        with strategy.scope():
            model = stack([keras.layers.Dense(4), limited(lab, 2), keras.layers.Dense(1)], "adam")
        backup = kd.callbacks.BackupAndRestore(folder)
        with logged(logging.INFO) as lines:
            try:
                model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[backup, *stops])
            except Interruption:
                backup.release()
        return [one for one in lines if "at a time" in one]

    with lab.folder() as folder, at_once("auto"):
        lines = run(folder, lab.strategy(), [Stopping()])
        lab.check(len(lines) == is_chief(lab), f"{lines}")
        lines = run(folder, lab.strategy(), [])
        lab.check(not lines, f"searched again: {lines}")
        lines = run(folder, lab.strategy(), [Stopping()])
        if not hasattr(lab, "job"):
            alone = lab.with_replicas(1)
            lines = run(folder, alone.strategy(), [])
            lab.check(len(lines) == 1, f"with fewer replicas: {lines}")


@case("passes", backends=("jax",), replicas=(2,))
def planned(lab):
    """On JAX nothing runs to find the number: XLA says what memory a step takes."""
    from kerasdist.backends.jax.loops.replicas import JaxReplicaSet

    def build():
        layers = [keras.layers.Dense(64, "tanh") for _ in range(3)]
        return stack([*layers, keras.layers.Dense(1)], "sgd")

    x, y = regression(4096)
    with (
        mock.patch.object(JaxReplicaSet, "free_bytes", return_value=1_000_000),
        at_once("auto"),
        logged(logging.INFO) as lines,
    ):
        lab.made(build).fit(x, y, batch_size=4096, verbose=0)
    lines = [one for one in lines if "at a time" in one]
    lab.check(len(lines) == 1, f"{lines}")


@case("passes", backends=("torch",), replicas=(1, 2))
def out_of_memory(lab):
    """A device without memory: the error names the setting."""

    class Large(keras.layers.Layer):
        def call(self, x):
            if x.device.type != "meta":
                raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
            return x

    model = lab.made(lambda: stack([Large(), keras.layers.Dense(1)], "sgd"))
    notes = []
    try:
        model.fit(*regression(8), verbose=0)
    except torch.OutOfMemoryError as error:
        notes = error.__notes__
    lab.check(notes and "set_most_examples_at_once" in notes[-1], f"received the notes {notes}")
