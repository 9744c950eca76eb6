"""Options of fit, evaluate and predict; the *_on_batch methods; compile in and out of the scope."""

import contextlib
import warnings

from tests.conformance.actions import evaluate, fit, predict, quiet_fit
from tests.conformance.lazy import kd, keras
from tests.conformance.models import classification, classifier, dense, regression, weights_for
from tests.conformance.registry import REPLICAS, case

N, BATCH = 23, 4


def with_steps(lab, steps):
    x, y = regression(N)
    lab.same(
        lambda: dense(steps_per_execution=steps),
        fit(x, y, batch_size=BATCH, epochs=2, validation_data=(x[:7], y[:7])),
        evaluate(x, y, batch_size=BATCH),
        predict(x, batch_size=BATCH),
    )


# Plain Keras on torch refuses it: what to compare with there is one step an execution, below.
@case("steps per execution", backends=("tensorflow", "jax"))
def steps_per_execution(lab):
    """`steps_per_execution=3`, which 6 batches with a ragged tail divide."""
    with_steps(lab, 3)


@case("steps per execution", backends=("tensorflow", "jax"))
def steps_per_execution_not_dividing(lab):
    """`steps_per_execution=4`, which does not divide 6 batches."""
    with_steps(lab, 4)


@case("steps per execution")
def steps_per_execution_equals_single_steps(lab):
    """`steps_per_execution` changes no number: weights, history, predictions (torch too)."""
    x, y = regression(N)
    actions = [
        quiet_fit(x, y, batch_size=BATCH, epochs=2, validation_data=(x[:7], y[:7])),
        evaluate(x, y, batch_size=BATCH),
        predict(x, batch_size=BATCH),
    ]
    expected = lab.run(dense, actions)[1]
    for steps in (3, 4):
        build = lambda steps=steps: dense(steps_per_execution=steps)  # noqa: E731
        actual = lab.run(build, actions, lab.strategy())[1]
        lab.equal(expected.parts(True), actual.parts(True))


@case("steps per execution")
def steps_per_execution_and_epoch(lab):
    """`steps_per_execution` with `steps_per_epoch` on an endless source."""

    def make():
        index = 0
        while True:
            index += 1
            yield regression(6, seed=index % 4)

    actions = [quiet_fit(make, epochs=2, steps_per_epoch=6)]
    expected = lab.run(dense, actions)[1]
    actual = lab.run(lambda: dense(steps_per_execution=2), actions, lab.strategy())[1]
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
    x, y = regression(11)
    lab.same(
        lambda: dense(jit_compile=True),
        fit(x, y, batch_size=BATCH),
        evaluate(x, y, batch_size=BATCH),
        predict(x, batch_size=BATCH),
    )


@case("compilation", backends=("tensorflow",), replicas=(2,))
def jit_compile_of_a_step(lab):
    """A `train_step` decorated with `jit_compile=True`: equal, and a warning says without XLA."""

    def build():
        class Decorated(keras.Sequential):
            @kd.function(jit_compile=kd.has_strategy())
            def train_step(self, data):
                return super().train_step(data)

        model = Decorated(dense().layers)
        model.compile("sgd", "mse")
        return model

    x, y = regression(11)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lab.same(build, quiet_fit(x, y, batch_size=BATCH))
    said = [str(one.message) for one in caught if "a step decorated with jit" in str(one.message)]
    lab.check(len(said) == 1, f"{said}")


@case("compilation", backends=("torch",), replicas=(2,))
def jit_compile_torch(lab):
    """`jit_compile=True` (torch.compile)."""
    x, y = regression(8)
    # Plain Keras uncompiled: Inductor would take a minute of the processor for the same numbers.
    lab.same(lambda: dense(jit_compile=kd.has_strategy()), quiet_fit(x, y, batch_size=BATCH))


@case("compilation")
def no_jit(lab):
    """`jit_compile=False`."""
    x, y = regression(11)
    lab.same(
        lambda: dense(jit_compile=False),
        fit(x, y, batch_size=BATCH),
        predict(x, batch_size=BATCH),
    )


@case("compilation")
def run_eagerly(lab):
    """`run_eagerly=True`."""
    x, y = regression(11)
    lab.same(
        lambda: dense(run_eagerly=True),
        fit(x, y, batch_size=BATCH),
        evaluate(x, y, batch_size=BATCH),
        predict(x, batch_size=BATCH),
    )


@case("compilation", backends=("tensorflow", "jax"))
def no_retrace_after_the_first_epoch(lab):
    """No retrace after the first epoch, tail and validation included."""
    traces = []

    def build():
        class Spy(keras.layers.Layer):
            def call(self, x):
                traces.append(x.shape)
                return x

        model = keras.Sequential([keras.Input((4,)), Spy(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        return model

    x, y = regression(11)
    counts = []
    count = lambda: [  # noqa: E731
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: counts.append(len(traces)))
    ]
    options = {"batch_size": BATCH, "validation_data": (x, y)}
    lab.run(
        build,
        [
            quiet_fit(x, y, epochs=5, callbacks=count, **options),
            lambda model: counts.append(len(traces)) or model.fit(x, y, verbose=0, **options),
            lambda model: counts.append(len(traces)),
        ],
        lab.strategy(),
    )
    lab.check(counts[0] > 0, "the first epoch must have traced something")
    lab.equal([counts[0]] * len(counts), counts)


@case("compilation", backends=("jax",))
def no_recompile_after_the_first_epoch(lab):
    """No XLA compilation after the first epoch."""
    import logging

    import jax

    compiled = []

    class Count(logging.Handler):
        def emit(self, record):
            if "Compiling" in record.getMessage():
                compiled.append(record.getMessage()[:200])

    marks = []
    handler, logger = Count(), logging.getLogger("jax")
    mark = lambda: [  # noqa: E731
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: marks.append(len(compiled)))
    ]
    x, y = regression(11)
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    jax.config.update("jax_log_compiles", True)
    try:
        action = quiet_fit(x, y, batch_size=BATCH, epochs=4, callbacks=mark, validation_data=(x, y))
        lab.run(lambda: dense(keras.optimizers.Adam(0.01)), [action], lab.strategy())
    finally:
        jax.config.update("jax_log_compiles", False)
        logger.removeHandler(handler)
        logger.propagate = propagate
    lab.check(marks[0] > 0, "the first epoch must have compiled something")
    lab.check(
        marks[1] == marks[-1],
        f"compiled after the second epoch began: {marks} {compiled[marks[1] :][:4]}",
    )
    lab.check(marks[0] == marks[1], f"compiled in the second epoch: {compiled[marks[0] :][:4]}")


@case("fit")
def second_fit(lab):
    """A second fit, fit after evaluate and predict, another batch size."""
    x, y = regression(11)
    lab.same(
        dense,
        evaluate(x, y, batch_size=BATCH),
        fit(x, y, batch_size=BATCH),
        predict(x, batch_size=3),
        fit(x, y, batch_size=5),
        evaluate(x, y, batch_size=7),
    )


@case("fit")
def initial_epoch(lab):
    """`initial_epoch`."""
    x, y = regression(11)
    lab.same(dense, fit(x, y, batch_size=BATCH, initial_epoch=2, epochs=4))


@case("fit")
def steps_per_epoch(lab):
    """`steps_per_epoch` less than the data gives, over epochs."""
    x, y = regression(N)
    lab.same(dense, fit(x, y, batch_size=BATCH, steps_per_epoch=3, epochs=2))


@case("fit")
def verbose(lab):
    """The progress bar and `verbose=2` say what plain Keras's say."""
    import io
    import re

    x, y = regression(11)

    def shown(level):
        def action(model):
            text = io.StringIO()
            with contextlib.redirect_stdout(text):
                model.fit(x, y, batch_size=BATCH, epochs=2, verbose=level)
            # How often the bar is drawn depends on time; its last drawing does not.
            lines = [re.split(r"[\r\x08]+", line)[-1] for line in text.getvalue().split("\n")]
            text = re.sub(r"\d+[mu]?s(/step|/epoch)?", "", "\n".join(lines))
            return re.sub(r"\d+\.\d+(e[+-]\d+)?", "#", text).split()

        return action

    lab.same(dense, shown(2), shown(1))


@case("fit")
def history(lab):
    """`model.history` is the History of the last fit."""
    x, y = regression(11)

    def action(model):
        returned = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
        return [model.history is returned, model.history.history, model.history.params["steps"]]

    lab.same(dense, action)


@case("on batch", replicas=REPLICAS)
def on_batch_methods(lab):
    """`train_on_batch`, `test_on_batch`, `predict_on_batch`, batches of several sizes."""

    def action(model):
        seen = []
        for index, size in enumerate((6, 1, 5, 3)):
            x, y = regression(size, seed=index)
            seen.append(model.train_on_batch(x, y, sample_weight=weights_for(size) + 0.1))
            seen.append(model.test_on_batch(x, y, return_dict=True))
            seen.append(model.predict_on_batch(x))
        seen.append(model.train_on_batch(*regression(4), return_dict=True))
        model.reset_metrics()
        seen.append(model.test_on_batch(*regression(4)))
        return seen

    lab.same(dense, action)


@case("on batch")
def on_batch_class_weight(lab):
    """`train_on_batch` with `class_weight`."""
    x, y = classification(7)
    action = lambda model: model.train_on_batch(x, y, class_weight={0: 1, 1: 3, 2: 0.5})  # noqa: E731
    lab.same(classifier, action, action)


@case("on batch")
def calling_the_model(lab):
    """`model(x)` outside of any step, before and after fit."""
    x, y = regression(7)

    def call(model):
        return model(x)

    lab.same(dense, call, fit(x, y, batch_size=BATCH), call)


@case("compile")
def compile_outside(lab):
    """compile after the scope, with an optimizer and metrics made outside."""
    x, y = regression(11)

    def build():
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])

    def compile_(model):
        model.compile(keras.optimizers.Adam(0.02), "mse", metrics=[keras.metrics.R2Score()])

    from tests.conformance.compare import ADAPTIVE

    lab.same(
        build,
        compile_,
        fit(x, y, batch_size=BATCH),
        evaluate(x, y, batch_size=BATCH),
        tolerance=ADAPTIVE,
    )


@case("compile")
def recompile(lab):
    """compile again, with another optimizer, between two fits."""
    x, y = regression(11)

    def again(model):
        model.compile(keras.optimizers.SGD(0.02, momentum=0.5), "mae", metrics=["mse"])

    lab.same(dense, fit(x, y, batch_size=BATCH), again, fit(x, y, batch_size=BATCH))


@case("compile")
def optimizer_made_outside(lab):
    """An optimizer and a metric made outside, compiled in the scope."""
    x, y = regression(11)
    optimizers = [keras.optimizers.SGD(0.1, momentum=0.9) for _ in range(2)]
    metrics = [keras.metrics.RootMeanSquaredError(name="rmse") for _ in range(2)]

    lab.same(
        lambda: dense(optimizers.pop(), metrics=[metrics.pop()]),
        fit(x, y, batch_size=BATCH, epochs=2),
    )


@case("compile")
def fit_in_the_scope(lab):
    """fit, evaluate and predict called inside the scope."""
    x, y = regression(11)
    strategy = lab.strategy()
    actions = [
        fit(x, y, batch_size=BATCH),
        evaluate(x, y, batch_size=BATCH),
        predict(x, batch_size=BATCH),
    ]
    expected = lab.run(dense, actions)[1]

    def inside(action):
        def act(model):
            with strategy.scope():
                return action(model)

        return act

    actual = lab.run(dense, [inside(action) for action in actions], strategy)[1]
    lab.equal(expected.parts(True), actual.parts(True))


@case("weights by hand")
def set_weights(lab):
    """`set_weights`, `get_weights` and `assign` between fits reach every replica."""
    x, y = regression(11)

    def double(model):
        model.set_weights([2.0 * value for value in model.get_weights()])
        model.layers[-1].bias.assign([0.25])
        return model.get_weights()

    lab.same(dense, fit(x, y, batch_size=BATCH), double, fit(x, y, batch_size=BATCH))
