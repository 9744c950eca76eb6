"""What the loss adds up: regularizers, `add_loss`, Keras's loss functions and the user's."""

import numpy as np

from tests.conformance.actions import evaluate, fit
from tests.conformance.lazy import keras
from tests.conformance.models import (
    VOCABULARY,
    dense,
    regression,
    stack,
    tagger,
    tokens,
    weights_for,
)
from tests.conformance.registry import case

N, BATCH = 13, 6  # at last a batch of one row
X, Y = regression(N)


@case("extra losses", like="layers.dense")
def regularizers(lab):
    """Kernel and bias regularizers: they don't depend on the batch."""

    def build():
        l2, layers = keras.regularizers.L2(0.05), keras.layers
        both = keras.regularizers.L1L2(0.01, 0.02)
        hidden = layers.Dense(5, kernel_regularizer=l2, bias_regularizer="l1")
        return stack([hidden, layers.Dense(1, kernel_regularizer=both)])

    lab.same(build, fit(X, Y, batch_size=BATCH, epochs=2), evaluate(X, Y, batch_size=BATCH))


def adding_losses():
    """Layers that add losses: penalties of the activity, one of which mixes examples."""

    class Penalty(keras.layers.Layer):
        def call(self, x):
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
            return x

    class Alike(keras.regularizers.Regularizer):
        def __call__(self, x):
            return 0.01 * keras.ops.sum(
                keras.ops.square(keras.ops.matmul(x, keras.ops.transpose(x)))
            )

    layers, l2 = keras.layers, keras.regularizers.L2(0.1)
    cubes = lambda x: 0.01 * keras.ops.sum(keras.ops.abs(x) ** 3)  # noqa: E731
    hidden = [layers.Dense(5, activity_regularizer=l2), Penalty()]
    hidden += [layers.Dense(4, activity_regularizer=cubes)]
    return stack(
        [*hidden, layers.Dense(1, activity_regularizer=Alike())], keras.optimizers.SGD(0.05)
    )


@case("extra losses")
def add_loss_mean(lab):
    """`add_loss` of a mean over the batch; activity regularizers, also of all pairs of examples.

    One is a function.
    """
    lab.same(adding_losses, fit(X, Y, batch_size=BATCH), evaluate(X, Y, batch_size=BATCH))


@case("extra losses", backends=("jax", "torch"))
def added_losses_read_after_a_step(lab):
    """`model.losses` after `fit`, `evaluate` and `predict` are those of the last batch."""
    # On TensorFlow plain Keras leaves tensors there of a graph that is no more.

    def losses_after(action):
        def act(model):
            model(X)
            action(model)
            return list(model.losses)

        return act

    options = {"batch_size": BATCH, "verbose": 0}
    lab.same(
        adding_losses,
        losses_after(lambda model: model.fit(X, Y, shuffle=False, **options)),
        losses_after(lambda model: model.evaluate(X, Y, **options)),
        losses_after(lambda model: model.predict(X, **options)),
    )


@case("loss functions")
def losses_of_the_user(lab):
    """A function with a value an example or the batch's mean; a `keras.Loss` with weights."""

    def cubed(y_true, y_pred):
        return keras.ops.mean(keras.ops.abs(y_true - y_pred) ** 3, axis=-1)

    def mean_of_all(y_true, y_pred):
        return keras.ops.mean(keras.ops.square(y_true - y_pred))

    class Quartic(keras.Loss):
        def call(self, y_true, y_pred):
            return keras.ops.mean((y_true - y_pred) ** 4, axis=-1)

    quartic = Quartic(reduction="mean_with_sample_weight")
    for loss, weights in ((cubed, None), (mean_of_all, None), (quartic, weights_for(N))):
        train = fit(X, Y, batch_size=BATCH, sample_weight=weights)
        lab.same(lambda loss=loss: dense(loss=loss), train)
    ids = tokens(N)  # of whose padding a mask takes part in the loss
    y, each = ids[..., None] / VOCABULARY, weights_for(N)[:, None] * np.ones(ids.shape, "float32")
    for weights in (None, each):  # which Keras multiplies by the mask in place, on PyTorch
        train = fit(ids, y, batch_size=BATCH, sample_weight=weights)
        lab.same(lambda: tagger(loss=Quartic()), train)
