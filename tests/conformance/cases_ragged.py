"""Batches that the replicas can't share evenly (traps 1 to 3)."""

import numpy as np

from tests.conformance.actions import evaluate, fit, predict, quiet_fit
from tests.conformance.lazy import keras
from tests.conformance.models import dense, regression
from tests.conformance.registry import REPLICAS, case

BATCH = 6


def one_weight(optimizer=None):
    """One kernel and nothing else: the weight after one step can be worked out by hand."""
    model = keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
        ]
    )
    model.compile(optimizer=optimizer or keras.optimizers.SGD(0.1), loss="mse")
    return model


@case("ragged batches", replicas=REPLICAS)
def every_tail(lab):
    """Every size of the last batch, 1 to a whole batch."""
    for tail in range(1, BATCH + 1):
        x, y = regression(BATCH + tail, seed=tail)
        lab.same(dense, fit(x, y, batch_size=BATCH, shuffle=False))


@case("ragged batches", replicas=(2,))
def mean_of_means(lab):
    """A batch of 3 on 2 replicas is one mean, not a mean of means."""
    y = np.array([[1.0], [2.0], [6.0]], "float32")
    model = lab.same(one_weight, fit(np.ones_like(y), y, batch_size=3))
    lab.equal([np.array([[0.6]], "float32")], model.get_weights())


@case("ragged batches", replicas=(2,))
def last_step_counts_whole(lab):
    """Five examples in batches of 4: the last example's step is a whole step."""
    x, y = np.ones((5, 1), "float32"), np.arange(1, 6, dtype="float32")[:, None]
    lab.same(one_weight, fit(x, y, batch_size=4, shuffle=False))


@case("ragged batches", replicas=REPLICAS)
def fewer_examples_than_replicas(lab):
    """One example, one less than replicas: some replicas have none."""
    for n in sorted({1, lab.replicas - 1}):
        x, y = regression(n)
        lab.same(
            dense,
            fit(x, y, batch_size=8, epochs=2),
            evaluate(x, y, batch_size=8),
            predict(x, batch_size=8),
            share_plain=False,
        )


def batches_of(*sizes):
    def make():
        for index, size in enumerate(sizes):
            yield regression(size, seed=index)

    return make


@case("ragged batches", replicas=REPLICAS)
def uneven_first_batch(lab):
    """The first batch is the uneven one: the model is built from it."""
    actions = [fit(batches_of(1, 6, 6)), evaluate(batches_of(3, 6))]
    lab.same(dense, *actions, length_unknown=True)


@case("ragged batches", replicas=REPLICAS)
def uneven_middle_batch(lab):
    """Uneven batches between even ones."""
    actions = [fit(batches_of(6, 1, 5, 6, 3, 2)), evaluate(batches_of(6, 1, 5, 6))]
    lab.same(dense, *actions, length_unknown=True)


@case("ragged batches")
def batch_size_one(lab):
    """`batch_size=1`: one replica works, the others wait."""
    x, y = regression(5)
    lab.same(dense, fit(x, y, batch_size=1), evaluate(x, y, batch_size=1), predict(x, batch_size=1))


@case("ragged batches")
def many_epochs(lab):
    """Six epochs with a ragged tail: differences would add up."""
    x, y = regression(23)
    lab.same(dense, quiet_fit(x, y, batch_size=8, epochs=6, shuffle=False))


@case("predict", replicas=REPLICAS)
def predict_in_order(lab):
    """`predict` on `arange(N)` for every N up to 17, in order."""

    def build():
        return keras.Sequential([keras.Input((1,)), keras.layers.Rescaling(2.0, offset=1.0)])

    def action(model):
        outputs = []
        for n in range(1, 18):
            x = np.arange(n, dtype="float32")[:, None]
            outputs.append(model.predict(x, batch_size=4, verbose=0))
        return outputs

    lab.same(build, action)
    for n, output in enumerate(lab.run(build, [action], lab.strategy())[1].results[0], start=1):
        lab.equal(2.0 * np.arange(n, dtype="float32")[:, None] + 1.0, output)


@case("predict")
def predict_without_compile(lab):
    """`predict` of a model that was never compiled."""
    x, _ = regression(7)

    def build():
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])

    lab.same(build, predict(x, batch_size=3))


@case("predict")
def predict_nested_outputs(lab):
    """`predict` keeps the structure of the outputs."""
    x, _ = regression(7)

    def build():
        inputs = keras.Input((4,))
        one = keras.layers.Dense(1, name="one")(inputs)
        two = keras.layers.Dense(2, name="two")(inputs)
        return keras.Model(inputs, {"a": one, "b": [two, one]})

    lab.same(build, predict(x, batch_size=4))


@case("ragged batches", replicas=(3,))
def strategy_of_a_second_model(lab):
    """Two models of one strategy, trained in turn."""
    strategy = lab.strategy()
    x, y = regression(10)
    lab.same(dense, fit(x, y, batch_size=4), strategy=strategy)
    lab.same(dense, fit(x, y, batch_size=3), strategy=strategy)
