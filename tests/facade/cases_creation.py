"""Variables, models and random generators that are made, or first used, in `run`."""

import numpy as np

from tests.facade.case import case
from tests.facade.lazy import kd, keras, ops


@case
def a_variable_made_in_run(lab):
    """A variable made lazily in a step is one variable, mirrored, of the strategy."""
    strategy = lab.strategy()

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
def a_model_and_an_optimizer_built_in_run(lab):
    """A model and an optimizer that are built in the first step train on."""
    strategy = lab.strategy()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(3, activation="relu"), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam(0.1)
    x = np.random.default_rng(0).random((8, 2)).astype("float32")

    def step(x):
        def loss():
            return ops.sum(ops.square(model(x, training=True) - 1.0)) / 8

        model(x)
        variables = model.trainable_variables
        value, gradients = kd.value_and_grad(loss, variables)
        optimizer.apply(gradients, variables)
        return value

    values = []
    for _ in range(3):
        for batch in strategy.distribute_dataset([x]):
            values.append(float(strategy.reduce("SUM", strategy.run(step, args=(batch,)), None)))
    lab.equal(4, len(model.trainable_variables))
    lab.equal(3, int(optimizer.iterations.numpy()))
    lab.check(values[2] < values[0], f"the loss falls, received {values}")
    for variable in model.trainable_variables:
        one, other = lab.components(variable, strategy)
        lab.equal(one, other)


@case
def dropout_in_replicas(lab):
    """Replicas drop other units, reproducibly; the seeds advance as on one device."""

    def masks():
        keras.utils.set_random_seed(11)
        keras.backend.clear_session()
        strategy = lab.strategy()
        with strategy.scope():
            layer = keras.layers.Dropout(0.5, seed=3)
        step = lambda: layer(ops.ones((64,)), training=True)  # noqa: E731
        runs = [lab.components(strategy.run(step), strategy) for _ in range(2)]
        return runs, lab.numpy(layer.seed_generator.state)

    runs, state = masks()
    drawn = [*runs[0], *runs[1]]
    for index, one in enumerate(drawn):
        for other in drawn[:index]:
            lab.check((one != other).any(), "two replicas or two steps drew the same")
    again, state_again = masks()
    lab.equal(runs, again)
    lab.equal(state, state_again)
    plain = keras.layers.Dropout(0.5, seed=3)
    for turn in range(2):
        lab.equal(runs[turn][0], plain(ops.ones((64,)), training=True))
    lab.equal(lab.numpy(plain.seed_generator.state), state)
