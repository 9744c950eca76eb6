"""BatchNormalization: synchronised by default, its moving statistics one (trap 4)."""

import tempfile
from pathlib import Path
from unittest import mock

import numpy as np

from tests.conformance.actions import fit, predict, used
from tests.conformance.compare import NORMAL
from tests.conformance.lazy import keras
from tests.conformance.models import compiled, regression, stack, tokens
from tests.conformance.registry import REPLICAS, case

N, BATCH = 13, 6  # at last a batch of one row
X, Y = regression(N)


def normalised(momentum=0.9, **options):
    return stack(
        [
            keras.layers.Dense(5),
            keras.layers.BatchNormalization(momentum=momentum, **options),
            keras.layers.Activation("tanh"),
            keras.layers.Dense(1),
        ],
        metrics=["mae"],
    )


def only_normalisation(momentum=0.0):
    return stack(
        [keras.layers.BatchNormalization(momentum=momentum)], keras.optimizers.SGD(0.0), inputs=(1,)
    )


def far_apart(replicas):
    """The first half of the global batch far from the second."""
    half = 2 * replicas
    x = np.repeat(np.array([[0.0], [10.0]], "float32"), half, axis=0)
    return x, np.zeros_like(x)


@case("batch normalisation", replicas=REPLICAS)
def synchronised(lab):
    """Global mean and variance, gradients through them, ragged batches."""
    lab.same(normalised, *used(X, Y, BATCH, epochs=2), tolerance=NORMAL)


@case("batch normalisation", backends=("torch",), replicas=(2,))
def rematerialized(lab):
    """In a `keras.RematScope`, which computes each layer once more in the backward pass."""

    def build():
        with keras.RematScope("full"):
            return normalised()

    lab.same(build, fit(X, Y, batch_size=BATCH, epochs=2), tolerance=NORMAL)


@case("batch normalisation", replicas=REPLICAS)
def moving_statistics(lab):
    """Input far apart by replica: moving mean 5 and variance 25, on every replica."""
    x, y = far_apart(lab.replicas)
    model = lab.same(
        only_normalisation, fit(x, y, batch_size=len(x), shuffle=False), share_plain=False
    )
    layer = model.layers[0]
    lab.equal([5.0, 25.0], [float(np.array(v)[0]) for v in layer.get_weights()[2:]])


def masked():
    layers = [keras.layers.Masking(), keras.layers.BatchNormalization(momentum=0.8)]
    layers += [keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
    return stack([*layers], inputs=(5, 4))


def series():
    x = np.random.default_rng(0).normal(size=(N, 5, 4)).astype("float32")
    x[tokens(N) == 0] = 0.0
    return x, regression(N)[1]


@case("batch normalisation", replicas=REPLICAS)
def with_masks(lab):
    """A mask: only unmasked steps count; the moments of large jobs, which are not gathered."""
    from kerasdist.training import batch_norm

    lab.same(masked, *used(*series(), BATCH), tolerance=NORMAL)
    with mock.patch.object(batch_norm, "MOST_GATHERED", 1):
        for build, data in ((normalised, (X, Y)), (masked, series())):
            lab.same(build, *used(*data, BATCH), tolerance=NORMAL)


@case("batch normalisation", like="normalization.synchronised")
def frozen(lab):
    """On batches, frozen, loaded by a plain model; `BatchNormalization(synchronized=True)`."""

    def on_batches(model):
        batches = [regression(size, seed=index) for index, size in enumerate((6, 5, 2))]
        return [model.train_on_batch(*batch) for batch in batches]

    def freeze(model):
        model.layers[1].trainable = False
        model.compile(keras.optimizers.SGD(0.1), "mse")

    train = fit(X, Y, batch_size=BATCH)
    model = lab.same(normalised, on_batches, train, freeze, train, tolerance=NORMAL)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        plain = keras.models.load_model(path)
    lab.equal(plain.predict(X, verbose=0), model.predict(X, verbose=0))
    # On JAX and PyTorch Keras takes `synchronized=True` in a scope only.
    actions = [train, predict(X, batch_size=BATCH)]
    expected = lab.run(normalised, actions)[1]
    actual = lab.run(lambda: normalised(synchronized=True), actions, lab.strategy())[1]
    lab.equal(expected.parts(True), actual.parts(True), NORMAL)


@case(
    "batch normalisation",
    replicas=(2, 4),
    refused={"jax": ("UnsupportedError", "per_replica.*synchronized|synchronized.*per_replica")},
)
def per_replica(lab):
    """`batch_norm="per_replica"`: own statistics, the moving ones averaged; each call counts."""
    strategy = lab.strategy(batch_norm="per_replica")
    n = 4 * lab.replicas
    x = np.repeat(np.arange(lab.replicas, dtype="float32"), 4)[:, None]

    def ended(build, factor):
        data = factor * x, np.zeros((n, 1), "float32")
        _, outcome = lab.run(build, [fit(*data, batch_size=n, shuffle=False)], strategy)
        return [one.item() for one in outcome.weights[2:]], outcome.results[0]["history"]["history"]

    statistics, history = ended(only_normalisation, 10.0)
    lab.equal([5.0 * (lab.replicas - 1), 0.0], statistics)
    # Every replica sees its own constant: nothing is left after normalisation.
    lab.equal([0.0], history["loss"])

    def called_twice():
        inputs = keras.Input((1,))
        layer = keras.layers.BatchNormalization(momentum=0.5)
        model = keras.Model(inputs, keras.layers.Add()([layer(inputs), layer(inputs)]))
        return compiled(model, keras.optimizers.SGD(0.0), "mse")

    # From 0 half of the way to the mean of the replicas' means, and half of the rest.
    lab.equal([3.0 * (lab.replicas - 1), 0.25], ended(called_twice, 8.0)[0])
