"""What the loss adds up: regularizers, `add_loss`, Keras's loss functions and the user's."""

from tests.conformance.actions import evaluate, fit
from tests.conformance.lazy import keras
from tests.conformance.models import dense, regression, stack, weights_for
from tests.conformance.registry import case

N, BATCH = 11, 6


@case("extra losses")
def regularizers(lab):
    """Kernel and bias regularizers: they don't depend on the batch."""
    x, y = regression(N)

    def build():
        l2, layers = keras.regularizers.L2(0.05), keras.layers
        both = keras.regularizers.L1L2(0.01, 0.02)
        hidden = layers.Dense(5, kernel_regularizer=l2, bias_regularizer="l1")
        return stack([hidden, layers.Dense(1, kernel_regularizer=both)])

    lab.same(build, fit(x, y, batch_size=BATCH, epochs=2), evaluate(x, y, batch_size=BATCH))


@case("extra losses", like="losses.add_loss_mean")
def activity_regularizer(lab):
    """An activity regularizer: Keras divides it by the batch's size."""
    x, y = regression(N)
    regularized = {"activity_regularizer": keras.regularizers.L2(0.1)}
    layers = keras.layers
    lab.same(
        lambda: stack([layers.Dense(5, **regularized), layers.Dense(1)]),
        *(fit(x, y, batch_size=BATCH), evaluate(x, y, batch_size=BATCH)),
    )


def with_add_loss(reduce):
    class Penalty(keras.layers.Layer):
        def call(self, x):
            self.add_loss(0.1 * getattr(keras.ops, reduce)(keras.ops.square(x)))
            return x

    return stack(
        [keras.layers.Dense(5), Penalty(), keras.layers.Dense(1)], keras.optimizers.SGD(0.05)
    )


@case("extra losses")
def add_loss_mean(lab):
    """`add_loss` of a mean over the batch."""
    x, y = regression(N)
    lab.same(
        lambda: with_add_loss("mean"), fit(x, y, batch_size=BATCH), evaluate(x, y, batch_size=BATCH)
    )


@case("extra losses", backends=("jax", "torch"))
def added_losses_read_after_a_step(lab):
    """`model.losses` after `fit`, `evaluate` and `predict` are those of the last batch."""
    # On TensorFlow plain Keras leaves tensors there of a graph that is no more.
    x, y = regression(N)

    def build():
        model = with_add_loss("mean")
        model.layers[0].activity_regularizer = keras.regularizers.L2(0.1)
        return model

    def losses_after(action):
        def act(model):
            model(x)
            action(model)
            return list(model.losses)

        return act

    options = {"batch_size": BATCH, "verbose": 0}
    lab.same(
        build,
        losses_after(lambda model: model.fit(x, y, shuffle=False, **options)),
        losses_after(lambda model: model.evaluate(x, y, **options)),
        losses_after(lambda model: model.predict(x, **options)),
    )


@case("loss functions")
def loss_function_of_the_user(lab):
    """A plain function as loss: a value an example."""
    x, y = regression(N)

    def cubed(y_true, y_pred):
        return keras.ops.mean(keras.ops.abs(y_true - y_pred) ** 3, axis=-1)

    lab.same(lambda: dense(loss=cubed), fit(x, y, batch_size=BATCH))


@case("loss functions", like="losses.loss_function_of_the_user")
def loss_class_of_the_user(lab):
    """A subclass of `keras.Loss` with weights; a function whose scalar is the batch's mean."""
    x, y = regression(N)

    class Quartic(keras.Loss):
        def call(self, y_true, y_pred):
            return keras.ops.mean((y_true - y_pred) ** 4, axis=-1)

    def mean_of_all(y_true, y_pred):
        return keras.ops.mean(keras.ops.square(y_true - y_pred))

    weighted = fit(x, y, batch_size=BATCH, sample_weight=weights_for(N))
    lab.same(lambda: dense(loss=Quartic(reduction="mean_with_sample_weight")), weighted)
    lab.same(lambda: dense(loss=mean_of_all), fit(x, y, batch_size=BATCH))
