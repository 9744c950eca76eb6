"""Lookups in tables by indices of the batch, and by others.

On TensorFlow the gradient of a lookup has one entry per index, and Keras's optimizers square and
clip entry by entry. The optimizers have Keras's own epsilon: a large one hides what they square.
"""

import numpy as np

from tests.conformance.actions import fit
from tests.conformance.compare import ADAPTIVE
from tests.conformance.lazy import keras, tf
from tests.conformance.models import compiled
from tests.conformance.registry import case

WORDS, LENGTH, WIDTH = 7, 6, 3

ADAMW = "AdamW, clipped by the global norm"
OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(0.01),
    ADAMW: lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.1),
    "RMSprop, clipped by value": lambda: keras.optimizers.RMSprop(0.01, clipvalue=0.01),
    "SGD, clipped by the norm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.02),
}


def sentences(rows):
    """Token ids with many repetitions, padded with 0; two rows in three are equal."""
    data = np.random.default_rng(3)
    x = data.integers(1, WORDS, (rows, LENGTH)).astype("int32")
    x[1::3] = x[::3][: len(x[1::3])]
    x[:, -1] = 0
    return x, data.normal(size=(rows, LENGTH)).astype("float32")


def every_lookup():
    """A layer that looks up in all ways at once, in a table of its own for each."""

    class Lookups(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.tables = [keras.layers.Embedding(LENGTH + 4, WIDTH) for _ in range(9)]
            # A place has a distance to each other place: its row of this matrix.
            places = np.arange(LENGTH)
            self.distances = np.abs(places[:, None] - places[None, :])

        def build(self, shape):
            for table in self.tables:
                table.build(None)

        def call(self, tokens):
            ops = keras.ops
            word, place, one, both, kind, copied, far, start, size = self.tables
            rows, length = ops.shape(tokens)
            places = ops.arange(length)
            total = word(tokens)
            total += place(places)  # as in GPT
            total += one(ops.expand_dims(ops.arange(LENGTH), 0))  # as in ViT
            total += both(tokens) * both(places)  # one table for both
            total += kind(ops.zeros_like(tokens))  # as BERT's second sentences
            total += copied(ops.broadcast_to(places, (rows, length)))
            total += ops.mean(far(self.distances), 1)  # as in T5 and Swin: indices come twice
            total += ops.expand_dims(start(ops.zeros((rows,), "int32")), 1)
            return total + ops.expand_dims(size(ops.minimum(ops.max(tokens, 1), 3)), 1)

    return Lookups()


def build(optimizer, **options):
    tokens = keras.Input((LENGTH,), dtype="int32")
    outputs = keras.layers.Dense(1)(keras.layers.LayerNormalization()(every_lookup()(tokens)))
    model = keras.Model(tokens, keras.layers.Reshape((LENGTH,))(outputs))
    return compiled(model, OPTIMIZERS[optimizer](), "mse", **options)


def check(optimizer):
    def checked(lab):
        # A batch whose size is known while the step is traced, and batches of an unknown size, of
        # which the last has one row.
        x, y = sentences(13)
        lab.same(
            lambda: build(optimizer),
            fit(x[:12], y[:12], batch_size=12),
            fit(x, y, batch_size=6),
            tolerance=ADAPTIVE,
        )

    return checked


for _optimizer in OPTIMIZERS:
    _name = _optimizer.partition(",")[0].lower()
    _title = f"Positions, tokens, distances in tables: {_optimizer}"
    _like = "" if _name == "adamw" else "lookups.adamw"
    case("lookups", name=_name, title=_title, like=_like)(check(_optimizer))


@case("lookups", replicas=(2,), like="lookups.adamw")
def eagerly(lab):
    """Positions, tokens, distances in tables: AdamW with `run_eagerly=True`."""
    x, y = sentences(9)
    lab.same(lambda: build(ADAMW, run_eagerly=True), fit(x, y, batch_size=5), tolerance=ADAPTIVE)


@case("lookups", backends=("tensorflow",), replicas=(2,))
def functions_in_eager_steps(lab):
    """A layer that calls a `tf.function`, which is traced in a step with `run_eagerly=True`."""
    x, y = sentences(9)

    class Traced(keras.layers.Layer):
        def call(self, x):
            return tf.function(keras.ops.tanh)(x)

    def traced():
        layers = [keras.layers.Embedding(WORDS, 3), Traced(), keras.layers.Flatten()]
        model = keras.Sequential([keras.Input((LENGTH,), dtype="int32"), *layers])
        model.add(keras.layers.Dense(LENGTH))
        return compiled(model, "adam", "mse", run_eagerly=True)

    lab.same(traced, fit(x, y, batch_size=5))
