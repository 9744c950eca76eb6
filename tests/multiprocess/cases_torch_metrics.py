"""Metrics that PyTorch's workers sum with the gradients, without a message of their own."""

from unittest import mock

from tests.conformance.actions import fit
from tests.conformance.lazy import keras, torch
from tests.conformance.models import compiled, regression, watched
from tests.conformance.registry import case

TORCH = ("torch",)
BATCH = 7
X, Y = regression(45)


def _with_two_outputs():
    """The layer that updates a metric comes after the first weights."""
    inputs = keras.Input(X.shape[1:])
    hidden = watched()(keras.layers.Dense(5, activation="tanh")(inputs))
    return keras.Model(inputs, [keras.layers.Dense(1)(hidden) for _ in range(2)])


@case("workers", backends=TORCH)
def metrics_that_go_with_the_gradients(lab):
    """Losses, and metrics of layers, have no message of their own in a step; others have one."""
    sizes = []
    all_reduce = torch.distributed.all_reduce

    def noted(tensor, *arguments, **keywords):
        sizes.append(len(tensor))
        return all_reduce(tensor, *arguments, **keywords)

    weights = 5 * X.shape[1] + 5 + 2 * (5 + 1)
    parameters, early = 6, 2 * 4  # sums and counts: the loss, two outputs' losses, the activation
    for metrics, late in ((None, []), ([["mae"], ["mse"]], [2 * 2])):
        sizes.clear()
        with mock.patch.object(torch.distributed, "all_reduce", noted):
            lab.same(
                lambda metrics=metrics: compiled(
                    _with_two_outputs(), "adam", "mse", metrics=metrics
                ),
                fit(X[: 6 * BATCH], [Y[: 6 * BATCH], -Y[: 6 * BATCH]], batch_size=BATCH, epochs=2),
            )
        message = weights + parameters + early  # of each step but the first
        lab.equal([message, *late] * 11, sizes[sizes.index(message) :])


@case("workers", backends=TORCH)
def metrics_of_some_rows(lab):
    """A layer's metric that only the chief's rows update in the first step goes in no bucket."""

    class Some(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.watch = keras.metrics.Mean(name="large")

        def call(self, x):
            if x.device.type != "meta" and bool((x[:, 0] > 1).any()):
                self.watch.update_state(x[:, 0][x[:, 0] > 1])
            return x

    x = X.copy()
    x[:, 0] = 0.0
    x[[0, 2 * BATCH - 1, 3 * BATCH], 0] = 2.0  # first of all a row of the chief

    def build():
        inputs = keras.Input(X.shape[1:])
        model = keras.Model(inputs, keras.layers.Dense(1)(Some()(inputs)))
        return compiled(model, "adam", "mse")

    lab.same(build, lambda model: model.fit(x, Y, batch_size=BATCH, epochs=2, verbose=0))
    lab.same(build, fit(x, Y, batch_size=BATCH, epochs=2))
