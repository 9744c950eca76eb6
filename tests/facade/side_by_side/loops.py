"""Whole custom loops with Keras's models, optimizers, losses and metrics."""

import keras
import numpy as np
import tensorflow as tf

import kerasdist as kd
from tests.facade.side_by_side.harness import case, per_replica, ways


def trained(d, strategy, make, optimizer, steps=4, build=True, rows=(4, 4, 3, 4)):
    """Weights and losses of a custom loop."""
    keras.utils.set_random_seed(1)
    keras.backend.clear_session()
    with strategy.scope():
        model, optimizer = make(), optimizer()
        loss_function = keras.losses.MeanSquaredError()
        metric = keras.metrics.MeanSquaredError()
        if build:
            optimizer.build(model.trainable_variables)

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            prediction = model(x, training=True)
            loss = loss_function(y, prediction)
            scaled = optimizer.scale_loss(loss)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(scaled, variables), variables, strict=True))
        metric.update_state(y, prediction)
        return loss

    @tf.function
    def step(x, y):
        return strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)), axis=None)

    random, losses = np.random.default_rng(0), []
    for _, count in zip(range(steps), rows, strict=False):
        x = per_replica(
            strategy, lambda i, n=count: tf.constant(random.normal(size=(n + i, 3)), "float32")
        )
        y = strategy.run(lambda x: tf.reduce_sum(x, 1, keepdims=True), args=(x,))
        losses.append(step(x, y))
    with strategy.scope():
        optimizer.finalize_variable_values(model.trainable_variables)
        result = metric.result()
    # Moving statistics differ by replica: of Keras the first one's count, of ours the mean.
    weights = [
        np.mean(parts, 0) for parts in map(strategy.experimental_local_results, values(model))
    ]
    return [weights, losses, [v.numpy() for v in optimizer.variables], result]


def values(model):
    return [variable.value for variable in model.variables]


def dense():
    return keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    )


@case
def loop_with_adamw(d, strategy):
    return trained(d, strategy, dense, lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1))


@case
def loop_with_moving_average(d, strategy):
    make = lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True)  # noqa: E731
    return trained(d, strategy, dense, make)


@case
def loop_with_loss_scale(d, strategy):
    make = lambda: keras.optimizers.LossScaleOptimizer(  # noqa: E731
        keras.optimizers.SGD(0.1), initial_scale=4.0, dynamic_growth_steps=2
    )
    return trained(d, strategy, dense, make)


@case
def loop_with_model_and_optimizer_built_in_it(d, strategy):
    make = lambda: keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])  # noqa: E731
    return trained(d, strategy, make, lambda: keras.optimizers.Adam(0.01), build=False)


@case
def loop_with_batch_normalization(d, strategy):
    results = []
    for synchronized in (False, True):

        def make(synchronized=synchronized):
            norm = keras.layers.BatchNormalization(synchronized=synchronized)
            return keras.Sequential(
                [keras.Input((3,)), keras.layers.Dense(4), norm, keras.layers.Dense(1)]
            )

        results.append(trained(d, strategy, make, lambda: keras.optimizers.SGD(0.1)))
    return results


@case
def loop_with_embeddings(d, strategy):
    def make():
        indices = keras.layers.Lambda(lambda x: tf.cast(tf.abs(x * 3.0), tf.int32))
        embed = keras.layers.Embedding(12, 4)
        return keras.Sequential(
            [keras.Input((3,)), indices, embed, keras.layers.Flatten(), keras.layers.Dense(1)]
        )

    return trained(d, strategy, make, lambda: keras.optimizers.Adam(0.01))


@case
def losses_by_hand(d, strategy):
    namespace = kd if d is kd else tf.nn

    def step(x):
        weights = tf.constant([1.0, 2.0])
        return [
            namespace.compute_average_loss(x),
            namespace.compute_average_loss(x, sample_weight=weights, global_batch_size=7),
            namespace.compute_average_loss(x, global_batch_size=tf.constant(5)),
            namespace.scale_regularization_loss(x),
            namespace.scale_regularization_loss([x, x * 2.0]),
        ]

    return ways(strategy, step, per_replica(strategy, lambda i: tf.constant([1.0, 2.0 + i])))
