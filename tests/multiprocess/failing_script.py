"""One worker of a small training job in which something goes wrong.

python -m tests.multiprocess.failing_script BACKEND BEHAVIOUR
"""

import os
import signal
import sys

import numpy as np

from tests.conformance.worker import prepare

prepare(sys.argv[1])

import keras  # noqa: E402

import kerasdist as kd  # noqa: E402

ROWS = 40
RANK = int(os.environ["KERASDIST_RANK"])


def data(rows=ROWS):
    generator = np.random.default_rng(1)
    x = generator.normal(size=(rows, 4)).astype("float32")
    return x, x[:, :1] * 2


def model(strategy, units=8, optimizer="adam"):
    with strategy.scope():
        layers = [keras.layers.Input((4,)), keras.layers.Dense(units), keras.layers.Dense(1)]
        made = keras.Sequential(layers, name="small")
        made.compile(optimizer, "mse")
    return made


class At(keras.callbacks.Callback):
    """Sends this process a signal at one of Keras's events, if it is worker 1."""

    def __init__(self, event, number):
        super().__init__()
        self._count = 0
        if RANK == 1:
            setattr(self, event, lambda *_, **__: self._strike(number))

    def _strike(self, number):
        self._count += 1
        if self._count == 3:
            print("striking", flush=True)
            os.kill(os.getpid(), number)


def fit(made, rows=ROWS, callbacks=(), **arguments):
    x, y = data(rows)
    arguments = {"epochs": 2, "batch_size": 8, "verbose": 0, **arguments}
    return made.fit(x, y, callbacks=list(callbacks), **arguments)


def refused(what, call):
    try:
        call()
    except kd.errors.DisagreementError as error:
        print(f"refused {what}: {error}", flush=True)
    else:
        print(f"not refused {what}", flush=True)


def be_killed_in_an_epoch(strategy):
    """After all that workers may disagree on, which is no reason to end."""
    good = model(strategy)
    refused("batches", lambda: fit(good, rows=ROWS + 16 * RANK))
    refused("epochs", lambda: fit(good, epochs=2 + RANK))
    other = model(strategy, optimizer=keras.optimizers.SGD(0.1 * (1 + RANK)))
    refused("optimizer", lambda: fit(other))
    fit(good)
    print("went on", flush=True)
    fit(good, callbacks=[At("on_train_batch_end", signal.SIGKILL)])


def be_killed_in_validation(strategy):
    killer = At("on_test_batch_begin", signal.SIGKILL)
    fit(model(strategy), validation_data=data(), callbacks=[killer])


def be_stopped_in_an_epoch(strategy):
    fit(model(strategy), callbacks=[At("on_train_batch_end", signal.SIGSTOP)])


def have_another_model(strategy):
    made = model(strategy, units=8 + RANK)
    fit(made)


def main():
    strategy = kd.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(3)
    globals()[sys.argv[2]](strategy)
    print("came to the end", flush=True)


if __name__ == "__main__":
    main()
