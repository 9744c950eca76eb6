"""Another thread that uses Keras while a model trains, and finds everything as it left it.

The model's own code waits for the other thread, so that it acts in every step, those of the
first-batch check included.
"""

import queue
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tests.conformance.lazy import keras
from tests.conformance.models import compiled

SEED = 7
RATE = 0.01


class Other:
    """What a thread of the user does, one turn at a time, and what it found."""

    def __init__(self):
        self.turns = 0
        self.complaints = []
        self._requests = queue.Queue()
        self._lock = threading.Lock()
        self._drawn = {"numpy": [], "python": []}
        self._counter = keras.Variable(np.zeros(3, "float32"))
        self._generator = keras.random.SeedGenerator(SEED)
        inputs = keras.Input((1,))
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        self._model = keras.Model(inputs, dense(inputs))
        # The gradient is the mean of x, which is 1.
        self._model.compile(keras.optimizers.SGD(RATE), loss=lambda y, p: keras.ops.mean(p))
        self._ones, self._kernel = np.ones((2, 1), "float32"), 0.0
        self._expected = keras.random.SeedGenerator(SEED)
        threading.Thread(target=self._serve, daemon=True).start()

    def turn(self):
        with self._lock:
            done = threading.Event()
            self._requests.put(done)
            if not done.wait(60):
                self.complaints.append("the other thread is stuck")

    def _serve(self):
        while True:
            done = self._requests.get()
            try:
                self._act()
            except Exception as error:  # noqa: BLE001  a complaint
                self.complaints.append(f"{type(error).__name__}: {error}"[:300])
            done.set()

    def _act(self):
        self.turns += 1
        self._compare("variable", keras.ops.convert_to_numpy(self._counter), self.turns - 1)
        self._counter.assign(np.full(3, self.turns, "float32"))
        self._model.train_on_batch(self._ones, self._ones)
        [kernel] = self._model.get_weights()
        # Not against the sum of all steps, whose rounding grows with them.
        self._compare("weight of another model", kernel, self._kernel - RATE)
        self._kernel = kernel
        drawn, expected = (
            keras.ops.convert_to_numpy(keras.random.uniform((8,), seed=one))
            for one in (self._generator, self._expected)
        )
        self._compare("seeded draws", drawn, expected)
        order = np.arange(50, dtype="float32")
        self._compare_not("shuffle", keras.random.shuffle(order, seed=self.turns), order)
        ones = keras.ops.ones((50,))
        self._compare_not("dropout", keras.random.dropout(ones, 0.5, seed=self.turns), 1.0)
        for name, number in (("numpy", np.random.rand()), ("python", random.random())):
            if number in self._drawn[name]:
                self.complaints.append(f"turn {self.turns}: {name} draws {number} twice")
            self._drawn[name].append(number)

    def _compare_not(self, name, received, before):
        if (keras.ops.convert_to_numpy(received) == before).all():
            self.complaints.append(f"turn {self.turns}: {name} did nothing")

    def _compare(self, name, received, expected):
        if not np.allclose(received, expected, rtol=1e-4, atol=1e-6):
            self.complaints.append(
                f"turn {self.turns}: {name} {np.ravel(received)[:3]}, expected {expected}"
            )


def waiting_model(other):
    """A model whose call waits for a turn of the other thread."""

    class Waiting(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = keras.layers.Dense(8, activation="relu")
            self.norm = keras.layers.BatchNormalization()
            self.last = keras.layers.Dense(1)

        def call(self, x, training=None):
            hidden = self.first(x)
            if other is not None:
                other.turn()
            return self.last(self.norm(hidden, training=training))

    return compiled(Waiting(), keras.optimizers.SGD(0.05), "mse")


def data(rows=22):
    x = np.random.default_rng(0).normal(size=(rows, 4)).astype("float32")
    return x, x[:, :1]


def fit_together(strategy):
    """Fits two models at the same time, each in a thread of its own.

    Returns the weights with which they began, and their weights after it, or errors.
    """
    models = []
    for _ in range(2):
        with strategy.scope():
            models.append(waiting_model(None))
        models[-1](data()[0][:2])
    start = [model.get_weights() for model in models]

    def fitted(model):
        model.fit(*data(), batch_size=6, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    with ThreadPoolExecutor(len(models)) as pool:
        ended = [pool.submit(fitted, model) for model in models]
    return start, [one.exception() or one.result() for one in ended]
