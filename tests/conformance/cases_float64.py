"""In double precision the numbers of one device come out to twelve digits."""

import functools

import numpy as np

from tests.conformance.actions import evaluate, fit, predict
from tests.conformance.compare import ADAPTIVE
from tests.conformance.double import FLOAT64, double_precision
from tests.conformance.lab import fresh
from tests.conformance.lazy import kd, keras
from tests.conformance.models import (
    regression,
    stack,
    weights_for,
)
from tests.conformance.registry import case

# Batches of 7 and 4 rows on 3 replicas: no share is a round number.
N, BATCH, EVERYWHERE = 11, 7, (3,)


def in_double(function):
    @functools.wraps(function)
    def checked(lab):
        with double_precision(lab.backend):
            function(lab)

    return checked


def doubles(n, outputs=1):
    return tuple(np.float64(part) for part in regression(n, outputs))


def train_and_test(lab, build, x, y, tolerance=FLOAT64, **options):
    lab.same(
        build,
        fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, **options),
        evaluate(x, y, batch_size=BATCH, **options),
        predict(x, batch_size=BATCH),
        tolerance=tolerance,
    )


@case("float64", replicas=EVERYWHERE)
@in_double
def normalization(lab):
    """BatchNormalization and LayerNormalization, Adam with clipping by the global norm."""
    x, y = doubles(N)

    def build():
        layers = keras.layers
        return stack(
            [
                layers.BatchNormalization(momentum=0.7),
                layers.Dense(6, activation="tanh"),
                layers.LayerNormalization(),
                layers.Dense(5),
                layers.BatchNormalization(momentum=0.7),
                layers.Dense(1),
            ],
            keras.optimizers.Adam(0.01, global_clipnorm=0.5),
            "huber",
            metrics=["mse"],
        )

    train_and_test(lab, build, x, y)


@case("float64", backends=("jax",), replicas=EVERYWHERE)
def float32_where_jax_has_64_bits(lab):
    """A float32 model where `jax_enable_x64` is on for other code."""
    import jax

    x, y = regression(N)

    def build():
        layers = keras.layers
        return stack(
            [
                layers.Dense(6, activation="tanh"),
                layers.BatchNormalization(momentum=0.7),
                layers.Dropout(0.0),
                layers.Dense(1),
            ],
            keras.optimizers.Adam(0.01),
            "huber",
            metrics=["mse"],
        )

    with jax.enable_x64(True):
        train_and_test(lab, build, x, y, ADAPTIVE, sample_weight=weights_for(N))


@case("float64", replicas=EVERYWHERE)
@in_double
def loop(lab):
    """A loop over `strategy.run`: `compute_average_loss`, `reduce`, all-reduce, Adam."""
    x, y = doubles(N)
    strategy = lab.strategy()

    def build():
        layers = keras.layers
        return stack(
            [layers.Dense(6, activation="tanh"), layers.Dense(1)], keras.optimizers.Adam(0.01), None
        )

    def train(model):
        def step(features, targets, total):
            def loss_of():
                error = keras.ops.square(model(features, training=True) - targets)
                return kd.compute_average_loss(error[:, 0], global_batch_size=total)

            loss, gradients = kd.value_and_grad(loss_of, model.trainable_variables)
            model.optimizer.apply(gradients, model.trainable_variables)
            return loss, features

        seen = []
        for start in (0, BATCH, 0):
            part = slice(start, start + BATCH)
            [batch] = strategy.distribute_dataset([(x[part], y[part])])
            loss, rows = strategy.run(step, (*batch, len(x[part])))
            seen += [strategy.reduce("SUM", loss, None), strategy.reduce("MEAN", rows, 0)]
        return seen

    fresh()
    with strategy.scope():
        model = build()
    received = train(model), model.get_weights()
    fresh()
    model = build()
    expected = fitted(model, x, y), model.get_weights()
    lab.equal(expected, received, FLOAT64)


def fitted(model, x, y):
    """What the loop's steps find, by Keras's own step on one device."""
    model.compile(keras.optimizers.Adam(0.01), "mse")
    seen = []
    for start in (0, BATCH, 0):
        rows, targets = x[start : start + BATCH], y[start : start + BATCH]
        model.reset_metrics()
        seen += [model.train_on_batch(rows, targets), rows.mean(0)]
    return seen


@case("float64", replicas=EVERYWHERE)
def reduction(lab):
    """`reduce` along the rows keeps float64 where Keras's own mean does not."""
    with double_precision(lab.backend, narrowed=True):
        rows, _ = doubles(N)
        for strategy in lab.strategy(), kd.OneDeviceStrategy("cpu:0"):
            [batch] = strategy.distribute_dataset([rows])
            for operation, expected in ("SUM", rows.sum(0)), ("MEAN", rows.mean(0)):
                lab.equal(expected, strategy.reduce(operation, batch, axis=0), FLOAT64)
