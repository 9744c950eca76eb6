"""`add_loss` in the `call` of a user-defined model, and of models and layers inside it."""

from tests.conformance import steps
from tests.conformance.actions import evaluate, fit
from tests.conformance.lazy import keras
from tests.conformance.models import compiled, regression
from tests.conformance.registry import case

N, BATCH = 11, 3
X, Y = regression(N)


def adding_model(kind, *, nested=False, **options):
    """Adds a mean over the batch in `call`; the inner models likewise, and twice."""

    class Adding(kind):
        def __init__(self, units, inner=None):
            super().__init__()
            self.inner = inner
            self.hidden = keras.layers.Dense(4, activation="tanh")
            self.head = keras.layers.Dense(units)

        def call(self, x, training=False):
            hidden = self.hidden(x if self.inner is None else self.inner(x))
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(hidden)))
            self.add_loss([0.02 * keras.ops.mean(hidden)])
            return self.head(hidden)

    model = Adding(1, Adding(3, Adding(3)) if nested else None)
    options.setdefault("loss", "mse")
    return compiled(model, keras.optimizers.SGD(0.1), **options)


def on_batches(x, y):
    def act(model):
        return [
            model.train_on_batch(x[:5], y[:5]),
            model.test_on_batch(x[:4], y[:4]),
            model.train_on_batch(x[5:8], y[5:8], return_dict=True),
        ]

    return act


@case("extra losses")
def in_call_of_a_model(lab):
    """`add_loss` in the `call()` of models inside of models: `fit`, `evaluate`, on batches."""
    lab.same(
        lambda: adding_model(keras.Model, nested=True),
        fit(X, Y, batch_size=BATCH, epochs=2, validation_data=(X, Y)),
        evaluate(X, Y, batch_size=BATCH),
        on_batches(X, Y),
    )


@case("extra losses", like="losses.in_call_of_a_model")
def in_call_and_run_eagerly(lab):
    """No loss but `add_loss` in `call()`, without compiling, and by several steps at once."""
    x, _ = regression(N)
    actions = fit(x, batch_size=BATCH), evaluate(x, batch_size=BATCH)
    ways = [{"run_eagerly": True}]
    if lab.backend != "torch":  # Keras has no steps_per_execution there
        ways += [{"steps_per_execution": 2}]
    for way in ways:
        lab.same(lambda way=way: adding_model(keras.Model, loss=None, **way), *actions)


@case("extra losses")
def in_a_step_of_the_users(lab):
    """`add_loss` in `call()`, the losses read in a user-defined `train_step`."""
    reporting = steps.of(lab.backend).reporting_model
    raw_loss = lambda model, y, y_pred, loss: {"raw": loss}  # noqa: E731
    lab.same(
        lambda: adding_model(reporting(raw_loss), nested=True),
        fit(X, Y, batch_size=BATCH, epochs=2),
        lambda model: len(model.losses) if lab.backend == "jax" else 0,
    )
