"""In double precision the numbers of one device come out to twelve digits."""

import functools

import numpy as np

from tests.conformance.actions import evaluate, fit, predict
from tests.conformance.compare import ADAPTIVE, Tolerance
from tests.conformance.double import FLOAT64, double_precision
from tests.conformance.lazy import kd, keras
from tests.conformance.models import (
    regression,
    stack,
    weights_for,
)
from tests.conformance.registry import case
from tests.facade.cases_training import Loop, batched

# Measured: from 1e-13 to 6e-12 after four steps; float32 runs of the same differ by up to 1e-3.
GROWN = Tolerance(1e-9, 1e-9, "float64 rounding, grown in normalized layers")
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
    """A loop over `strategy.run`: `compute_average_loss`, gradients, Adam."""
    loop = Loop(optimizer=lambda: keras.optimizers.Adam(0.01))
    batches = batched(doubles(N), BATCH)
    lab.equal(loop.plain(batches), loop.under(lab.strategy(), batches), FLOAT64)


def u_net():
    layers = keras.layers
    image = keras.Input((16, 16, 3))
    x = layers.Conv2D(4, 3, strides=2, padding="same")(image)
    x = previous = layers.ReLU()(layers.BatchNormalization()(x))
    for filters in (6,):
        for _ in range(2):
            x = layers.SeparableConv2D(filters, 3, padding="same")(layers.ReLU()(x))
            x = layers.BatchNormalization()(x)
        x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
        residual = layers.Conv2D(filters, 1, strides=2, padding="same")(previous)
        x = previous = layers.add([x, residual])
    for filters in (6, 4):
        for _ in range(2):
            x = layers.Conv2DTranspose(filters, 3, padding="same")(layers.ReLU()(x))
            x = layers.BatchNormalization()(x)
        x = layers.UpSampling2D(2)(x)
        residual = layers.Conv2D(filters, 1, padding="same")(layers.UpSampling2D(2)(previous))
        x = previous = layers.add([x, residual])
    model = keras.Model(image, layers.Conv2D(3, 3, activation="softmax", padding="same")(x))
    # The example's loss is the sparse one, which torch refuses to differentiate here, of plain
    # Keras's model too ("grad_input must be contiguous").
    model.compile(keras.optimizers.Adam(1e-3), "categorical_crossentropy")
    return model


@case("float64", replicas=(2,), like="float64.normalization")
@in_double
def oxford_pets_segmentation(lab):
    """keras.io's oxford_pets_image_segmentation: a U-Net of separable convolutions."""
    random = np.random.default_rng(1)
    x = random.uniform(0, 255, size=(14, 16, 16, 3))
    y = np.eye(3)[random.integers(0, 3, size=(14, 16, 16))]
    lab.same(u_net, fit(x, y, batch_size=BATCH, epochs=2, shuffle=False), tolerance=GROWN)


@case("float64", replicas=EVERYWHERE)
def reduction(lab):
    """`reduce` along the rows keeps float64 where Keras's own mean does not."""
    with double_precision(lab.backend, narrowed=True):
        rows, _ = doubles(N)
        for strategy in lab.strategy(), kd.OneDeviceStrategy("cpu:0"):
            [batch] = strategy.distribute_dataset([rows])
            for operation, expected in ("SUM", rows.sum(0)), ("MEAN", rows.mean(0)):
                lab.equal(expected, strategy.reduce(operation, batch, axis=0), FLOAT64)
