"""Custom loops of models, optimizers and metrics that were made outside of the scope."""

import contextlib

import numpy as np

from tests.conformance.lazy import kd, keras
from tests.facade.case import case
from tests.facade.lab import FLOAT32

ROWS, BATCH = 20, 5


def trained(strategy, compiled, model_in, rest_in, built_by_hand=False):
    """Losses, weights, count of steps, metric of a loop of parts made in the scope or not."""
    keras.backend.clear_session(free_memory=False)
    draws = np.random.default_rng(0).random((ROWS, 4)).astype("float32")
    wanted = draws.sum(1, keepdims=True)
    outside = contextlib.nullcontext
    with strategy.scope() if model_in else outside():
        first = keras.layers.Dense(3, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((4,)), first, keras.layers.Dense(1, name="last")])
        model.layers[1].kernel.assign(np.float32([[0.1], [0.2], [0.3]]))
    with strategy.scope() if rest_in else outside():
        optimizer = keras.optimizers.Adam(0.01)
        metric = keras.metrics.MeanSquaredError()
        metric.update_state([[1.0]], [[3.0]])  # a state from before
    if built_by_hand:
        with strategy.scope():
            optimizer.build(model.trainable_variables)
    squares = keras.losses.MeanSquaredError(reduction="none")

    def step(batch):
        x, y = batch

        def loss():
            each = squares(y, model(x, training=True))
            return kd.compute_average_loss(each, global_batch_size=BATCH)

        value, gradients = kd.value_and_grad(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        metric.update_state(y, model(x))
        return value

    def on_replicas(batch):
        return strategy.run(step, args=(batch,))

    run = kd.function(on_replicas) if compiled else on_replicas
    batches = [(draws[i : i + BATCH], wanted[i : i + BATCH]) for i in range(0, ROWS, BATCH)]
    losses = [
        strategy.reduce("SUM", run(batch), axis=None)
        for batch in strategy.distribute_dataset(batches)
    ]
    return [losses, list(model.weights), optimizer.iterations, metric.result()]


@case
def loops_of_parts_from_outside(lab):
    """Model, or optimizer and metric, made outside: the numbers of a loop of parts made inside."""
    expected = lab.numpy(trained(lab.strategy(), False, True, True))
    for way in (
        {"compiled": False, "model_in": True, "rest_in": False},
        {"compiled": False, "model_in": False, "rest_in": True},
        {"compiled": False, "model_in": False, "rest_in": False},
        {"compiled": False, "model_in": False, "rest_in": False, "built_by_hand": True},
        {"compiled": True, "model_in": False, "rest_in": False},
    ):
        lab.equal(expected, lab.numpy(trained(lab.strategy(), **way)), FLOAT32)


@case
def statistics_from_outside(lab):
    """The moving statistics of a BatchNormalization made outside are kept as those made inside."""

    def trained(inside):
        keras.backend.clear_session(free_memory=False)
        strategy = lab.strategy()
        with strategy.scope() if inside else contextlib.nullcontext():
            norm = keras.layers.BatchNormalization(momentum=0.5)
            norm.build((None, 4))
        rows = np.random.default_rng(0).normal(size=(2 * lab.replicas, 4)).astype("float32")
        for batch in strategy.distribute_dataset([rows, 2 * rows]):
            strategy.run(lambda part: norm(part, training=True), args=(batch,))
        strategy.run(lambda: norm(rows))
        return [norm.moving_mean, norm.moving_variance, norm(rows)]

    lab.equal(lab.numpy(trained(True)), lab.numpy(trained(False)), FLOAT32)
