"""One worker of a small training job in which something goes wrong.

python -m tests.multiprocess.failing_script BACKEND BEHAVIOUR
"""

import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np

from tests.multiprocess.forks import imported

# What a shell has started in the background ignores Ctrl-C; workers are not.
signal.signal(signal.SIGINT, signal.default_int_handler)
imported(sys.argv[1])

import keras  # noqa: E402

import kerasdist as kd  # noqa: E402
from tests.conformance.models import regression  # noqa: E402
from tests.multiprocess import networks  # noqa: E402

ROWS = 40
STRIKES = 3
RANK = int(os.environ["KERASDIST_RANK"])


def model(strategy):
    with strategy.scope():
        layers = [keras.layers.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)]
        made = keras.Sequential(layers, name="small")
        made.compile("adam", "mse")
    return made


class At(keras.callbacks.Callback):
    """Does something, on one worker, when one of Keras's events comes for the third time."""

    def __init__(self, event, deed, rank=1):
        super().__init__()
        self._count, self._deed = 0, deed
        if rank == RANK:
            setattr(self, event, lambda *_, **__: self._strike())

    def _strike(self):
        self._count += 1
        if self._count == STRIKES:
            strike(self._deed)


def strike(deed):
    print("striking", flush=True)
    if isinstance(deed, signal.Signals):
        os.kill(os.getpid(), deed)
    else:
        deed()


@keras.saving.register_keras_serializable("tests")
class Deadly(keras.layers.Layer):
    """Kills worker 1 in its first call for training, while the step is traced or compiled."""

    def call(self, inputs, training=None):
        if training and RANK == 1:
            strike(signal.SIGKILL)
        return inputs


def fit(made, rows=ROWS, callbacks=(), **arguments):
    x, y = regression(rows)
    arguments = {"epochs": 2, "batch_size": 8, "verbose": 0, **arguments}
    return made.fit(x, y, callbacks=list(callbacks), **arguments)


def be_killed_in_an_epoch(strategy):
    fit(model(strategy), callbacks=[At("on_train_batch_end", signal.SIGKILL)])


def be_stopped_in_an_epoch(strategy):
    fit(model(strategy), callbacks=[At("on_train_batch_end", signal.SIGSTOP)])


def be_interrupted_in_an_epoch(strategy):
    """By Ctrl-C on all workers, most of which wait in their framework then."""

    def interrupt():
        threading.Timer(0.5, strike, [signal.SIGINT]).start()

    fit(model(strategy), epochs=100_000, callbacks=[At("on_train_batch_end", interrupt, RANK)])


def be_killed_in_compile(strategy):
    with strategy.scope():
        made = keras.Sequential([keras.layers.Input((4,)), Deadly(), keras.layers.Dense(1)])
        made.compile("adam", "mse")
    fit(made)


def be_killed_in_a_compiled_loop(strategy):
    """``strategy.run`` is called in the compiled step alone, and only while that is traced."""
    with strategy.scope():
        made = model(strategy)
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(made.trainable_variables)

    def replica_step(x):
        def loss():
            return keras.ops.mean(keras.ops.square(made(x, training=True)))

        value, gradients = kd.value_and_grad(loss, made.trainable_variables)
        optimizer.apply(gradients, made.trainable_variables)
        return value

    @kd.function
    def step(x):
        return strategy.reduce("mean", strategy.run(replica_step, args=(x,)), axis=None)

    batch = keras.ops.ones((4, 4))
    for number in range(400):
        if number == STRIKES and RANK == 1:
            strike(signal.SIGKILL)
        try:
            keras.ops.convert_to_numpy(step(batch))
        except kd.errors.WorkerLostError as error:
            print("the step raised", error, flush=True)
            raise


def be_cut_off(strategy):
    fit(model(strategy), callbacks=[At("on_train_batch_end", networks.cut)], epochs=500)


def be_preempted(strategy):
    """Runs undisturbed, then preempted on each worker in turn; goes on; ends with the same."""

    def run(folder, rank=None):
        keras.utils.set_random_seed(5)
        made = model(strategy)
        backup = kd.callbacks.BackupAndRestore(Path(os.environ["FOLDER"], folder))
        kd.experimental.preempt(backup)
        callbacks = [backup, Seen(), At("on_train_batch_begin", signal.SIGTERM, rank)]
        fit(made, callbacks=callbacks, shuffle=True)
        return [*made.get_weights(), *map(keras.ops.convert_to_numpy, made.optimizer.variables)]

    expected = run("undisturbed")
    if os.environ["KERASDIST_RESTART"] == "0":
        try:
            run("preempted", rank=0)
        except SystemExit as error:
            print("left with", int(error.code), flush=True)
        check(run("preempted"), expected)
        run("preempted again", rank=1)
    check(run("preempted again"), expected)


class Seen(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        print("batch", batch, flush=True)


def check(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    print("equal", flush=True)


def have_data_that_ends(strategy):
    """The others wait for that worker in the step for which it has no batch."""
    x, y = regression(ROWS)

    def batches():
        for at in range(0, 24 if RANK else ROWS, 8):
            yield x[at : at + 8], y[at : at + 8]

    model(strategy).fit(batches(), verbose=0)


def freeze_a_layer(strategy):
    """The others may have begun a step that needs that worker's gradients."""

    class Freezes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.layers[0].trainable = batch < 2 or RANK == 0

    fit(model(strategy), callbacks=[Freezes()])


def hang_in_a_later_program(strategy):
    """On JAX, worker 1 has one more collective for a last batch of another size."""

    def loss(y, p):
        error = y - p
        if RANK == 1 and y.shape[0] not in (None, 8):
            error = keras.ops.sort(error, 0) * 1.5
        return keras.ops.mean(keras.ops.square(error), -1)

    made = model(strategy)
    made.compile("sgd", loss)
    fit(made, rows=ROWS + 4)


def read_alone(strategy):
    """Reads, on the chief alone, a variable that is sharded over the workers."""
    sharded = kd.MultiWorkerMirroredStrategy(sharding=kd.Sharding("full", min_size=1))
    made = model(sharded)
    if sharded.is_chief:
        print(made.weights[0].numpy())
    fit(made)


def reduce_alone(strategy):
    """Worker 1, while the chief is at the end of its script."""
    values = strategy.run(lambda: keras.ops.ones(()))
    if RANK == 1:
        print(strategy.reduce("SUM", values, axis=None))


def only_join(strategy):
    print("joined", strategy, flush=True)


def main():
    if sys.argv[2] == "be_cut_off":
        # JAX's Gloo asks for the address of the machine's name; torch's can be told another.
        networks.move_into_one(RANK, named=sys.argv[1] == "jax")
    strategy = kd.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(3)
    globals()[sys.argv[2]](strategy)
    print("came to the end", flush=True)


if __name__ == "__main__":
    main()
