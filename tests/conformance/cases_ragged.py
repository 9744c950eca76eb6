"""Batches that the replicas can't share evenly (traps 1 to 3)."""

import numpy as np

from tests.conformance.actions import fit, predict, used
from tests.conformance.lazy import keras
from tests.conformance.models import dense, regression, stack
from tests.conformance.registry import REPLICAS, case

BATCH = 6


def one_weight(optimizer=None):
    """One kernel and nothing else: the weight after one step can be worked out by hand."""
    return stack(
        [keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")],
        optimizer or keras.optimizers.SGD(0.1),
        inputs=(1,),
    )


@case("ragged batches", replicas=REPLICAS)
def every_tail(lab):
    """Every size of the last batch, 1 to a whole batch, one `fit` after another."""
    tails = [regression(BATCH + tail, seed=tail) for tail in range(1, BATCH + 1)]
    lab.same(dense, *(fit(x, y, batch_size=BATCH, shuffle=False) for x, y in tails))


@case("ragged batches", replicas=(2,))
def mean_of_means(lab):
    """A batch of 3 on 2 replicas is one mean, not a mean of means."""
    y = np.array([[1.0], [2.0], [6.0]], "float32")
    model = lab.same(one_weight, fit(np.ones_like(y), y, batch_size=3))
    lab.equal([np.array([[0.6]], "float32")], model.get_weights())


@case("ragged batches", replicas=(2, 3, 4), like="ragged.every_tail")
def fewer_examples_than_replicas(lab):
    """One example, one less than replicas: some replicas have none."""
    for n in sorted({1, lab.replicas - 1}):
        x, y = regression(n)
        lab.same(dense, *used(x, y, 8, epochs=2), share_plain=False)


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


@case("predict", like="ragged.predict_in_order")
def predict_nested_outputs(lab):
    """`predict` of a model that was never compiled keeps the structure of the outputs."""
    x, _ = regression(7)

    def build():
        inputs = keras.Input((4,))
        one = keras.layers.Dense(1, name="one")(inputs)
        two = keras.layers.Dense(2, name="two")(inputs)
        return keras.Model(inputs, {"a": one, "b": [two, one]})

    lab.same(build, predict(x, batch_size=4))
