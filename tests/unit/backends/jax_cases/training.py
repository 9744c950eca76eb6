"""Custom loops that train: the numbers of one device."""

import keras
import numpy as np
from keras import ops

import kerasdist as kd
from kerasdist.api.functions import function, value_and_grad
from kerasdist.api.losses import compute_average_loss
from tests.unit.backends.jax_cases.case import REPLICAS, case, components, index


def trained(strategy, sizes, features=3):
    """The weights and states of a model after a custom loop, lazily built in it."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam(0.05, global_clipnorm=0.5)
        metric = keras.metrics.MeanSquaredError()

    def replica_step(x, y, size):
        if not model.built:
            model.build((None, features))

        def loss():
            predicted = model(x, training=True)
            metric.update_state(y, predicted)
            errors = keras.losses.mean_squared_error(y, predicted)
            return compute_average_loss(errors, global_batch_size=size)

        value, gradients = value_and_grad(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    @function
    def step(batch, size):
        values = strategy.run(replica_step, args=(*batch, size))
        return strategy.reduce("SUM", values, axis=None)

    draws = np.random.default_rng(0)
    batches = [draws.normal(size=(size, features)).astype("float32") for size in sizes]
    pairs = [(x, x.sum(axis=1, keepdims=True)) for x in batches]
    losses = [
        float(step(batch, np.int32(size)))
        for batch, size in zip(strategy.distribute_dataset(pairs), sizes, strict=True)
    ]
    assert int(optimizer.iterations) == len(sizes)
    return losses, [*model.weights, *optimizer.variables], float(metric.result())


def equals_one_device(sizes):
    expected = trained(kd.OneDeviceStrategy("cpu:0"), sizes)
    for count in (2, 3, 4):
        found = trained(kd.MirroredStrategy([f"cpu:{i}" for i in range(count)]), sizes)
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
        for one, other in zip(found[1], expected[1], strict=True):
            np.testing.assert_allclose(one, other, atol=2e-6, err_msg=one.path)
        assert abs(found[2] - expected[2]) < 1e-5 * expected[2]


@case
def a_custom_loop_gives_the_numbers_of_one_device(strategy):
    equals_one_device([12, 12, 12])


@case
def so_it_does_where_batches_are_ragged_or_smaller_than_the_number_of_replicas(strategy):
    equals_one_device([12, 7, 1, 5, 7])


@case
def gradients_through_collectives_are_those_of_finite_differences(strategy):
    rows = strategy.distribute_values_from_function(
        lambda at: np.linspace(0.5, 1.5, 2 + at.replica_id_in_sync_group, dtype="float32")
    )
    weights = np.array([0.7], "float32")
    with strategy.scope():
        variable = keras.Variable(weights)

    def loss(x):
        here = kd.get_replica_context()
        scale = ops.cast(index() + 1, "float32")
        total = here.all_reduce("SUM", ops.sum(ops.sin(x * variable.value)))
        everyone = here.all_gather(ops.square(x * variable.value), axis=0)
        return scale * (total**2 + ops.sum(everyone**2))

    def step(x):
        value, [gradient] = value_and_grad(lambda: loss(x), [variable])
        return value, kd.get_replica_context().all_reduce("SUM", gradient)

    def whole(scale):
        variable.assign(weights + scale)
        values = strategy.run(lambda x: loss(x), args=(rows,))  # noqa: PLW0108
        return float(strategy.reduce("SUM", values, axis=None))

    _, gradient = strategy.run(step, args=(rows,))
    slope = (whole(1e-2) - whole(-1e-2)) / 2e-2
    np.testing.assert_allclose(components(strategy, gradient), [[slope]] * REPLICAS, rtol=2e-3)


@case
def an_optimizer_that_scales_the_loss_works_in_a_step(strategy):
    def scales(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            inner = keras.optimizers.Adam(0.01)
            optimizer = keras.optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=2)

        def replica_step(x):
            def loss():
                squares = ops.square(model(x)[:, 0])
                return optimizer.scale_loss(compute_average_loss(squares, global_batch_size=4))

            _, gradients = value_and_grad(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)

        step = function(lambda x: strategy.run(replica_step, args=(x,)))
        found = []
        for factor in (1.0, 1.0, np.nan, 1.0):
            for batch in strategy.distribute_dataset([np.full((4, 3), factor, "float32")]):
                step(batch)
            found.append(float(optimizer.dynamic_scale.value))
        return found, model.get_weights(), int(inner.iterations)

    found, expected = scales(strategy), scales(kd.OneDeviceStrategy("cpu:0"))
    assert found[0] == expected[0] == [2.0**15, 2.0**16, 2.0**15, 2.0**15]
    assert found[2] == expected[2] == 3
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)
