"""In double precision the numbers of one device come out to twelve digits."""

import functools

import numpy as np

from tests.conformance.actions import used
from tests.conformance.compare import ADAPTIVE
from tests.conformance.double import FLOAT64, double_precision
from tests.conformance.lazy import jax, kd, keras
from tests.conformance.models import regression, stack, weights_for
from tests.conformance.registry import case
from tests.facade.cases_training import Loop, batched

# Batches of 7 and 4 rows on 3 replicas: no share is a round number.
N, BATCH, EVERYWHERE = 11, 7, (3,)


def in_double(function):
    @functools.wraps(function)
    def checked(lab):
        with double_precision(lab.backend):
            function(lab)

    return checked


def doubles(n):
    return tuple(np.float64(part) for part in regression(n))


def train_and_test(lab, build, x, y, tolerance=FLOAT64, **options):
    lab.same(build, *used(x, y, BATCH, epochs=2, **options), tolerance=tolerance)


def normalizing(**options):
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
        keras.optimizers.Adam(0.01, **options),
        "huber",
        metrics=["mse"],
    )


@case("float64", replicas=EVERYWHERE)
@in_double
def normalization(lab):
    """BatchNormalization and LayerNormalization, Adam with clipping by the global norm."""
    train_and_test(lab, lambda: normalizing(global_clipnorm=0.5), *doubles(N))


@case("float64", backends=("jax",), replicas=EVERYWHERE)
def float32_where_jax_has_64_bits(lab):
    """A float32 model where `jax_enable_x64` is on for other code."""

    def build():
        layers = keras.layers
        hidden = [layers.Dense(6, activation="tanh"), layers.BatchNormalization(momentum=0.7)]
        optimizer = keras.optimizers.Adam(0.01)
        last = [layers.Dropout(0.0), layers.Dense(1)]
        return stack([*hidden, *last], optimizer, "huber", metrics=["mse"])

    with jax.enable_x64(True):
        weights = weights_for(N)
        train_and_test(lab, build, *regression(N), ADAPTIVE, sample_weight=weights)


@case("float64", replicas=EVERYWHERE)
@in_double
def loop(lab):
    """A loop over `strategy.run`: `compute_average_loss`, gradients, Adam."""
    loop = Loop(optimizer=lambda: keras.optimizers.Adam(0.01))
    batches = batched(doubles(N), BATCH)
    lab.equal(loop.plain(batches), loop.under(lab.strategy(), batches), FLOAT64)


@case("float64", replicas=EVERYWHERE)
def reduction(lab):
    """`reduce` along the rows keeps float64 where Keras's own mean does not."""
    with double_precision(lab.backend, narrowed=True):
        rows, _ = doubles(N)
        for strategy in lab.strategy(), kd.OneDeviceStrategy("cpu:0"):
            [batch] = strategy.distribute_dataset([rows])
            for operation, expected in ("SUM", rows.sum(0)), ("MEAN", rows.mean(0)):
                lab.equal(expected, strategy.reduce(operation, batch, axis=0), FLOAT64)
