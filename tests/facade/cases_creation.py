"""Variables, models and random generators that are made, or first used, in `run`."""

import numpy as np

from tests.conformance.lazy import kd, keras, ops
from tests.facade.case import case


@case
def a_variable_made_in_run(lab, strategy):
    """A variable made lazily in a step is one variable, mirrored, of the strategy."""

    class Lazy(keras.layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(shape[-1],), initializer="random_normal")

        def call(self, x):
            return x * self.w

    with strategy.scope():
        layer = Lazy()
    step = lambda: layer(ops.ones((2, 3)))  # noqa: E731
    first = lab.components(strategy.run(step), strategy)
    lab.equal(1, len(layer.weights))
    weights = lab.components(layer.w, strategy)
    lab.equal(2, len(weights))
    lab.equal(weights[0], weights[1])
    lab.equal([np.stack([weights[0]] * 2)] * 2, first)
    lab.equal(first, lab.components(strategy.run(step), strategy))
    lab.check(strategy.extended.variable_created_in_scope(layer.w), "it is the strategy's")


@case
def dropout_in_replicas(lab):
    """Replicas drop other units, reproducibly, compiled or not; seeds advance as on one device."""

    def masks():
        keras.utils.set_random_seed(11)
        keras.backend.clear_session()
        strategy = lab.strategy()
        with strategy.scope():
            layer = keras.layers.Dropout(0.5, seed=3)
        run = lambda: strategy.run(lambda: layer(ops.ones((64,)), training=True))  # noqa: E731
        compiled = kd.function(run)
        runs = [lab.components(one(), strategy) for one in (run, compiled, compiled)]
        return runs, lab.numpy(layer.seed_generator.state)

    runs, state = masks()
    drawn = [one for run in runs for one in run]
    for index, one in enumerate(drawn):
        for other in drawn[:index]:
            lab.check((one != other).any(), "two replicas or two steps drew the same")
    again, state_again = masks()
    lab.equal(runs, again)
    lab.equal(state, state_again)
    plain = keras.layers.Dropout(0.5, seed=3)
    for turn in range(3):
        lab.equal(runs[turn][0], plain(ops.ones((64,)), training=True))
    lab.equal(lab.numpy(plain.seed_generator.state), state)
