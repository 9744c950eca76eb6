"""Random draws: by the seed, different by replica, equal to one device on JAX (trap 5)."""

import contextlib

import numpy as np

from tests.conformance.actions import fit
from tests.conformance.lazy import kd, keras
from tests.conformance.models import compiled, regression, stack
from tests.conformance.registry import REPLICAS, case

N, BATCH = 11, 6
X, Y = regression(N)
OWN_DRAWS = (
    "each replica draws its own, repeatable by the seed; one device's draws after "
    '`kd.config.set_draws("global")`'
)
BY_REPLICA = dict.fromkeys(("tensorflow", "torch"), OWN_DRAWS)


def with_dropout():
    class Jitter(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.generator = keras.random.SeedGenerator(3)

        def call(self, x, training=False):
            if training:
                x = x + 0.1 * keras.random.normal(keras.ops.shape(x), seed=self.generator)
            return x

    layers = keras.layers
    noise = [layers.Dropout(0.4), layers.GaussianNoise(0.2), Jitter()]
    return stack([layers.Dense(16, activation="tanh"), *noise, layers.Dense(1)])


def always_dropping(seed=11):
    """Drops in `predict` too, so that the masks themselves come out, example by example."""

    class Always(keras.layers.Dropout):
        def call(self, inputs, training=False):
            return super().call(inputs, training=True)

    return keras.Sequential([keras.Input((32,)), Always(0.5, seed=seed)])


@contextlib.contextmanager
def draws_for_the_global_batch():
    kd.config.set_draws("global")
    try:
        yield
    finally:
        kd.config.set_draws("replica")


def as_one_device_or_by_the_seed(lab, build, *actions):
    """One device's draws; by default so on JAX alone, and the same again on the others."""
    with draws_for_the_global_batch():
        lab.same(build, *actions)
    if lab.backend == "jax":
        lab.same(build, *actions)
        return
    first, second = (lab.run(build, actions, lab.strategy())[1] for _ in range(2))
    lab.equal(first.parts(True), second.parts(True))
    lab.check(np.isfinite(first.results[0]["history"]["history"]["loss"]).all(), "a finite loss")


@case("random draws", limitation=BY_REPLICA)
def dropout(lab):
    """Dropout, noise, a layer's own draws: one device's on JAX, by the seed everywhere."""
    as_one_device_or_by_the_seed(lab, with_dropout, fit(X, Y, batch_size=BATCH, epochs=2))


@case("random draws", backends=("torch",), replicas=(2,), limitation=BY_REPLICA)
def rematerialized_dropout(lab):
    """In a `keras.RematScope` the backward pass drops the units that the forward pass dropped."""

    def build(mode):
        with keras.RematScope(mode):
            hidden = [keras.layers.Dense(16, "tanh"), keras.layers.Dropout(0.4)]
            layers = [*hidden, keras.layers.Dense(16), keras.layers.Dropout(0.4)]
            model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
        return compiled(model, keras.optimizers.SGD(0.1), "mse")

    actions = [fit(X, Y, batch_size=BATCH, epochs=2)]
    kept, again = (
        lab.run(lambda mode=mode: build(mode), actions, lab.strategy())[1]
        for mode in (None, "full")
    )
    lab.equal(kept.parts(True), again.parts(True))
    with draws_for_the_global_batch():
        lab.same(lambda: build("full"), *actions)


@case("random draws", limitation=BY_REPLICA)
def dropout_in_a_cell(lab):
    """`LSTM(dropout=...)`, which keeps its mask on the cell that the replicas share."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(N, 3, 4)).astype("float32"), regression(N)[1]

    def build():
        cells = keras.layers.LSTM(4, dropout=0.3, recurrent_dropout=0.2)
        return stack([cells, keras.layers.Dense(1)], inputs=(3, 4))

    as_one_device_or_by_the_seed(lab, build, fit(x, y, batch_size=BATCH, epochs=2))


@case("random draws", replicas=REPLICAS, limitation=BY_REPLICA)
def masks_differ_by_replica(lab):
    """Equal examples are dropped differently on each replica, and each time."""
    x = np.ones((4 * lab.replicas, 32), "float32")
    actions = [lambda model: model.predict(x, batch_size=len(x), verbose=0)] * 2
    outcome = lab.run(always_dropping, actions, lab.strategy())[1]
    one, two = (np.asarray(result) for result in outcome.results)
    lab.check(not np.array_equal(one, two), "the second call must draw anew")
    shares = np.split(one, lab.replicas)
    for index, share in enumerate(shares):
        for other in shares[index + 1 :]:
            lab.check(not np.array_equal(share, other), f"replica {index}'s mask came again")
    rows = {row.tobytes() for row in one}
    lab.equal(len(one), len(rows))
    again = lab.run(always_dropping, actions, lab.strategy())[1]
    lab.equal(outcome.results, again.results)
    if lab.backend == "jax":
        lab.equal(lab.run(always_dropping, actions)[1].results, outcome.results)


@case("random draws", like="random.dropout")
def another_seed_draws_otherwise(lab):
    """Another seed gives other masks: the draws follow `keras.utils.set_random_seed`."""
    x = np.ones((8, 32), "float32")

    def masks(seed):
        keras.utils.set_random_seed(seed)
        model = lab.made(lambda: always_dropping(seed=None))
        # Once more: some layers draw from the backend's own generator.
        keras.utils.set_random_seed(seed)
        return model.predict(x, batch_size=8, verbose=0)

    one, again, two = masks(1), masks(1), masks(2)
    lab.equal(one, again)
    lab.check(not np.array_equal(one, two), "the masks must depend on the seed")
