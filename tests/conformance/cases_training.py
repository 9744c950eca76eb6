"""Options of fit, evaluate and predict; the *_on_batch methods; compile in and out of the scope."""

import contextlib
import itertools

import numpy as np

from tests.conformance.actions import evaluate, fit, predict, quiet_fit, used
from tests.conformance.lazy import kd, keras
from tests.conformance.models import compiled, dense, regression, weights_for
from tests.conformance.registry import REPLICAS, case

N, BATCH = 21, 4  # at last a batch of one row
X, Y = regression(11)


@case("steps per execution")
def steps_per_execution_equals_single_steps(lab):
    """`steps_per_execution` changes no number (torch too); with `steps_per_epoch`, endless data.

    But in Keras 3.16 on torch, where 4 steps that do not divide 6 batches shuffle the next epoch
    otherwise: there it is compared with the same number of steps.
    """
    x, y = regression(N)

    def endless():
        for index in itertools.count(1):
            yield regression(6, seed=index % 4)

    of_arrays = [
        quiet_fit(x, y, batch_size=BATCH, epochs=2, validation_data=(x[:7], y[:7])),
        evaluate(x, y, batch_size=BATCH),
        predict(x, batch_size=BATCH),
    ]
    with_steps = [quiet_fit(endless, epochs=2, steps_per_epoch=6)]
    for steps, actions in ((3, of_arrays), (4, of_arrays), (2, with_steps)):
        build = lambda steps=steps: dense(steps_per_execution=steps)  # noqa: E731
        alike = lab.backend == "torch" and lab.keras_version >= (3, 16)
        expected = lab.run(build if alike else dense, actions)[1]
        actual = lab.run(build, actions, lab.strategy())[1]
        lab.equal(expected.parts(True), actual.parts(True))


@case(
    "compilation",
    backends=("tensorflow", "jax"),
    limitation={
        "tensorflow": "equal, but without XLA, as a warning says: replicas sum in the middle of a "
        "step, and what XLA has compiled cannot wait for another device; in a custom loop XLA "
        "compiles the forward and backward pass of each replica, see the guide"
    },
)
def jit_compile(lab):
    """`jit_compile=True`."""
    lab.same(lambda: dense(jit_compile=True), *used(X, Y, BATCH))


@case("compilation", backends=("tensorflow",), replicas=(2,))
def jit_compile_of_a_step(lab):
    """A `train_step` decorated with `jit_compile=True`: equal, and a warning says without XLA."""

    def build():
        class Decorated(keras.Sequential):
            @kd.function(jit_compile=kd.has_strategy())
            def train_step(self, data):
                return super().train_step(data)

        return compiled(Decorated(dense().layers), "sgd", "mse")

    with lab.told("a step decorated with jit") as said:
        lab.same(build, quiet_fit(X, Y, batch_size=BATCH))
    lab.check(len(said) == 1, f"{said}")


@case("compilation", backends=("torch",), replicas=(2,))
def jit_compile_torch(lab):
    """`jit_compile=True` (torch.compile)."""
    x, y = regression(8)
    # Plain Keras uncompiled: Inductor would take a minute of the processor for the same numbers.
    lab.same(lambda: dense(jit_compile=kd.has_strategy()), quiet_fit(x, y, batch_size=BATCH))


@case("compilation")
def run_eagerly(lab):
    """`run_eagerly=True`, and `jit_compile=False`."""
    x, y = regression(9)
    lab.same(lambda: dense(run_eagerly=True, jit_compile=False), *used(x, y, BATCH))


@case("fit")
def second_fit(lab):
    """`fit` after evaluate, predict and fit; other batch sizes, `initial_epoch`, `steps_per_epoch`.

    `model.history` is the History of the last one.
    """

    def noting(model):
        returned = model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0)
        return [model.history is returned, model.history.history, model.history.params["steps"]]

    lab.same(
        dense,
        evaluate(X, Y, batch_size=BATCH),
        fit(X, Y, batch_size=BATCH),
        predict(X, batch_size=3),
        fit(X, Y, batch_size=5),
        evaluate(X, Y, batch_size=7),
        fit(X, Y, batch_size=BATCH, initial_epoch=2, epochs=4),
        fit(X, Y, batch_size=BATCH, steps_per_epoch=2, epochs=2),
        noting,
    )


@case("fit", like="training.second_fit")
def verbose(lab):
    """The progress bar and `verbose=2` say what plain Keras's say."""
    import io
    import re

    def shown(level):
        def action(model):
            text = io.StringIO()
            with contextlib.redirect_stdout(text):
                model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=level)
            # How often the bar is drawn depends on time; its last drawing does not.
            lines = [re.split(r"[\r\x08]+", line)[-1] for line in text.getvalue().split("\n")]
            text = re.sub(r"\d+[mu]?s(/step|/epoch)?", "", "\n".join(lines))
            return re.sub(r"\d+\.\d+(e[+-]\d+)?", "#", text).split()

        return action

    lab.same(dense, shown(2), shown(1))


@case("on batch", replicas=REPLICAS)
def on_batch_methods(lab):
    """`train_on_batch`, `test_on_batch`, `predict_on_batch`, batches of several sizes."""

    def action(model):
        seen = []
        for index, size in enumerate((1, 6, 1, 5, 3)):
            x, y = regression(size, seed=index)
            seen.append(model.train_on_batch(x, y, sample_weight=weights_for(size) + 0.1))
            seen.append(model.test_on_batch(x, y, return_dict=True))
            seen.append(model.predict_on_batch(x))
        seen.append(model.train_on_batch(*regression(4), return_dict=True))
        model.reset_metrics()
        seen.append(model.test_on_batch(*regression(4)))
        return seen

    lab.same(dense, action)


@case("compile")
def recompile(lab):
    """`model(x)`, `set_weights`, `assign` and another `compile`, between fits."""
    train = fit(X, Y, batch_size=BATCH)

    def double(model):
        model.set_weights([2.0 * value for value in model.get_weights()])
        model.layers[-1].bias.assign([0.25])
        return model.get_weights()

    def again(model):
        model.compile(keras.optimizers.SGD(0.02, momentum=0.5), "mae", metrics=["mse"])

    def call(model):
        return model(X)

    lab.same(dense, call, train, call, double, train, again, train)


@case("compile")
def optimizer_made_outside(lab):
    """An optimizer and a metric made outside, compiled in the scope."""
    optimizers = [keras.optimizers.SGD(0.1, momentum=0.9) for _ in range(2)]
    metrics = [keras.metrics.RootMeanSquaredError(name="rmse") for _ in range(2)]

    lab.same(
        lambda: dense(optimizers.pop(), metrics=[metrics.pop()]),
        fit(X, Y, batch_size=BATCH, epochs=2),
    )


def two_outputs():
    """Outputs in a dict, with dropout, which predictions have not."""
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(3)(keras.layers.Dropout(0.5)(inputs))
    return keras.Model(inputs, {"hidden": hidden, "out": keras.layers.Dense(2)(hidden)})


def check_predict_to(lab, model, x):
    """`kd.predict_to` writes what `predict` returns, each row once, over all workers together."""
    expected = model.predict(x, batch_size=BATCH, verbose=0)
    batches = (x[:1], x[1:7], x[7:])
    for data in (x, iter(batches), ((batch, batch[:, :1]) for batch in batches)):
        rows, written = [], {name: np.full_like(one, np.nan) for name, one in expected.items()}

        def write(of, outputs, rows=rows, written=written):
            rows.extend(of.tolist())
            for name, one in outputs.items():
                written[name][of] = one

        kd.predict_to(write, model, data, batch_size=BATCH)
        lab.equal([*range(len(x))], sorted(itertools.chain.from_iterable(lab.everyone(rows))))
        for name, one in expected.items():
            lab.equal(one[rows], written[name][rows])


@case("predict to", replicas=REPLICAS)
def predictions_are_written_as_they_come(lab):
    """`kd.predict_to`: arrays and batches of 1, 6 and 14 rows; dropout is off; nothing is kept."""
    x, _ = regression(N)
    model = lab.made(two_outputs)
    check_predict_to(lab, model, x)


@case("predict to")
def predict_to_of_a_model_outside(lab):
    """`kd.predict_to` of a model without a strategy: each batch is one call."""
    x, _ = regression(N)
    sizes = []
    kd.predict_to(lambda rows, _: sizes.append(len(rows)), two_outputs(), x, batch_size=10)
    lab.equal([10, 10, 1], sizes)


@case("predict to")
def predict_to_refuses(lab):
    """`kd.predict_to` of a model that is not built, or that has a `predict_step` of its own."""

    class Own(keras.Sequential):
        def predict_step(self, *args):
            return super().predict_step(*args)

    x, _ = regression(N)
    for model in (keras.Sequential([keras.layers.Dense(1)]), Own([keras.Input((4,))])):
        with lab.raises(kd.errors.UnsupportedError, "built model with Keras's own `predict_step`"):
            kd.predict_to(lambda rows, outputs: None, model, x)
    with lab.raises(TypeError, "a function, a model and data, in this order"):
        kd.predict_to(model, x, print)
