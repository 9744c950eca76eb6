"""Batches that the replicas can't share evenly (traps 1 to 3)."""

import numpy as np

from tests.conformance.actions import fit, used
from tests.conformance.lazy import keras
from tests.conformance.models import dense, regression
from tests.conformance.registry import REPLICAS, case

BATCH = 6


@case("ragged batches", replicas=REPLICAS)
def every_tail(lab):
    """Every size of the last batch, 1 to a whole batch, one `fit` after another."""
    tails = [regression(BATCH + tail, seed=tail) for tail in range(1, BATCH + 1)]
    lab.same(dense, *(fit(x, y, batch_size=BATCH, shuffle=False) for x, y in tails))


@case("ragged batches", replicas=(2, 3, 4), like="ragged.every_tail")
def fewer_examples_than_replicas(lab):
    """One example, one less than replicas: some replicas have none."""
    for n in sorted({1, lab.replicas - 1}):
        x, y = regression(n)
        lab.same(dense, *used(x, y, 8, epochs=2), share_plain=False)


@case("predict", replicas=REPLICAS)
def predict_in_order(lab):
    """`predict` of 1 to 17 rows, in order, with nested outputs, of a model not compiled."""

    def build():
        inputs = keras.Input((1,))
        one = keras.layers.Rescaling(2.0, offset=1.0)(inputs)
        return keras.Model(inputs, {"a": one, "b": [keras.layers.Dense(2)(inputs), one]})

    def action(model):
        outputs = []
        for n in range(1, 18):
            x = np.arange(n, dtype="float32")[:, None]
            outputs.append(model.predict(x, batch_size=4, verbose=0))
        return outputs

    lab.same(build, action)
