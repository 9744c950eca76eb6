"""`fit`, `evaluate`, `predict`, random numbers and files under a strategy."""

import tempfile
from pathlib import Path

import numpy as np

from tests.conformance.lazy import kd, keras, ops
from tests.facade.behaviours import behaviour
from tests.facade.lab import FLOAT32, numbered

X = np.linspace(-1, 1, 30, dtype="float32").reshape(10, 3)
Y = np.float32(X.sum(-1, keepdims=True) > 0)


def model(strategy, metrics=(), optimizer="sgd", seed=1, **options):
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, activation="sigmoid")])
        made.compile(optimizer, "binary_crossentropy", metrics=list(metrics), **options)
    return made


def fit(**options):
    return lambda m: m.fit(X, Y, shuffle=False, verbose=0, **options).history


# What is done with one model after another call, by name: each goes on where the last one ended.
CALLS = {
    "fit": fit(batch_size=4, epochs=2),
    "again": fit(batch_size=4),
    "validation": fit(batch_size=4, validation_data=(X[:3], Y[:3])),
    "split": fit(batch_size=4, validation_split=0.3, initial_epoch=1, epochs=2),
    "weights": fit(batch_size=4, sample_weight=np.arange(10, dtype="float32")),
    "classes": fit(batch_size=4, class_weight={0: 1.0, 1: 3.0}),
    "evaluate": lambda m: m.evaluate(X[:7], Y[:7], batch_size=4, verbose=0, return_dict=True),
    "predict": lambda m: m.predict(X[:7], batch_size=4, verbose=0),
    "whole": lambda m: m.predict(X, batch_size=10, verbose=0),
    "few": lambda m: m.predict(X[:1], verbose=0),
    "on batch": lambda m: (m.train_on_batch(X, Y), m.test_on_batch(X, Y), m.predict_on_batch(X)),
}
_found = []


def found(s):
    """What each call returns, on one device and under a strategy, and both models; made once."""
    if not _found or _found[0] is not s:
        models = []
        for strategy in (kd.get_strategy(), s):
            with strategy.scope():
                metrics = [
                    keras.metrics.BinaryAccuracy(name="accuracy"),
                    keras.metrics.AUC(num_thresholds=20, name="curve"),
                    keras.metrics.FalseNegatives(name="missed"),
                ]
            models.append(model(strategy, metrics, "adam"))
        results = [{name: call(one) for name, call in CALLS.items()} for one in models]
        _found[:] = s, results, models
    return _found[1:]


def same(lab, s, *names):
    """Calls have returned what they return on one device."""
    (expected, ours), _ = found(s)
    for name in names:
        lab.equal(lab.numpy(expected[name]), lab.numpy(ours[name]), FLOAT32)


@behaviour("`fit` returns the same history as on one device")
def _(lab, s):
    same(lab, s, "fit")


@behaviour("A second call of `fit` continues where the first call ended")
def _(lab, s):
    same(lab, s, "again")


@behaviour(
    "After training the weights are the same as on one device, and all copies of a weight are equal"
)
def _(lab, s):
    _, (plain, ours) = found(s)
    for one, variable in zip(plain.variables, ours.variables, strict=True):
        lab.equal(one, variable, FLOAT32)
    for variable in ours.weights:
        first, second = lab.components(variable, s)
        lab.equal(first, second)


@behaviour("`fit` with `validation_data`, `validation_split` and `initial_epoch`")
def _(lab, s):
    same(lab, s, "validation", "split")


@behaviour("`fit` with `sample_weight` and `class_weight`")
def _(lab, s):
    same(lab, s, "weights", "classes")


@behaviour(
    "`evaluate` and `predict` take a number of rows that the number of replicas does not divide"
)
def _(lab, s):
    same(lab, s, "evaluate", "predict")


@behaviour("`predict` takes fewer rows than replicas, and returns rows in the order of its input")
def _(lab, s):
    same(lab, s, "whole", "few")
    (_, ours), _ = found(s)
    lab.equal(ours["whole"][:1], ours["few"], FLOAT32)
    lab.equal(ours["whole"][:7], ours["predict"], FLOAT32)


@behaviour("`train_on_batch`, `test_on_batch` and `predict_on_batch`")
def _(lab, s):
    same(lab, s, "on batch")


@behaviour("Metrics that are means, counts or curves are computed from the rows of all replicas")
def _(lab, s):
    (expected, ours), _ = found(s)
    for name in ("accuracy", "curve", "missed"):
        lab.equal(expected["evaluate"][name], ours["evaluate"][name], FLOAT32)


@behaviour("Metrics are reset at the start of each epoch")
def _(lab, s):
    (_, ours), _ = found(s)
    lab.check(
        max(ours["fit"]["missed"] + ours["again"]["missed"]) <= Y.sum(), "no more than there are"
    )


@behaviour("`fit` returns the same inside and outside of the scope")
def _(lab, s):
    def act(m):
        with s.scope():
            return fit(batch_size=5)(m)

    lab.equal(fit(batch_size=5)(model(s))["loss"], act(model(s))["loss"], FLOAT32)


@behaviour(
    "`steps_per_execution` above 1",
    torch="Plain Keras refuses this on PyTorch; under a strategy the steps are taken one by one.",
)
def _(lab, s):
    expected = fit(batch_size=2)(model(kd.get_strategy()))["loss"]
    lab.equal(expected, fit(batch_size=2)(model(s, steps_per_execution=2))["loss"], FLOAT32)


@behaviour("`run_eagerly=True`")
def _(lab, s):
    expected = fit(batch_size=5)(model(kd.get_strategy()))["loss"]
    lab.equal(expected, fit(batch_size=5)(model(s, run_eagerly=True))["loss"], FLOAT32)


@behaviour("`fit` with a distributed dataset trains as with the dataset itself")
def _(lab, s):
    batches = [(X[:4], Y[:4]), (X[4:], Y[4:])]
    expected, ours = model(kd.get_strategy()), model(s)
    one = expected.fit((batch for batch in batches), steps_per_epoch=2, verbose=0).history["loss"]
    other = ours.fit(s.distribute_dataset(batches), verbose=0).history["loss"]
    lab.equal(one, other, FLOAT32)


@behaviour("Callbacks get the logs of each epoch, and can set the learning rate")
def _(lab, s):
    ours, seen = model(s), []
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    see = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(sorted(logs)))
    ours.fit(X, Y, epochs=2, verbose=0, callbacks=[halve, see])
    lab.equal(0.0025, ours.optimizer.learning_rate, FLOAT32)
    lab.equal([["learning_rate", "loss"]] * 2, seen)


@behaviour("A model that was saved under a strategy can be loaded inside and outside of a scope")
def _(lab, s):
    ours = model(s)
    fit(batch_size=5)(ours)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        ours.save(path)
        outside = keras.models.load_model(path)
        with s.scope():
            inside = keras.models.load_model(path)
    expected = ours.predict(X, verbose=0)
    for loaded in (outside, inside):
        lab.equal(expected, loaded.predict(X, verbose=0), FLOAT32)
    lab.equal(2, len(lab.components(inside.weights[0], s)))
    lab.equal(fit(batch_size=4)(ours)["loss"], fit(batch_size=4)(inside)["loss"], FLOAT32)


@behaviour(
    "`load_weights` sets every copy of a weight, also if the number of replicas differs from that "
    "of the saved model"
)
def _(lab, s):
    ours, three = model(s, seed=1), lab.strategy(3)
    other = model(three, seed=2)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "only.weights.h5")
        ours.save_weights(path)
        other.load_weights(path)
    for one, two in zip(ours.weights, other.weights, strict=True):
        lab.equal([lab.numpy(one)] * 3, lab.components(two, three))


@behaviour("`set_weights` sets every copy of a weight")
def _(lab, s):
    ours = model(s)
    ours.set_weights([np.ones_like(one) for one in ours.get_weights()])
    for variable in ours.weights:
        for part in lab.components(variable, s):
            lab.equal(np.ones_like(part), part)


@behaviour("`model.save` also saves the state of the optimizer")
def _(lab, s):
    ours = model(s, optimizer="adam")
    fit(batch_size=5)(ours)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        ours.save(path)
        with s.scope():
            loaded = keras.models.load_model(path)
    for one, other in zip(ours.optimizer.variables, loaded.optimizer.variables, strict=True):
        lab.equal(one, other)


@behaviour("A model that `clone_model` copies in the scope trains like the original")
def _(lab, s):
    ours = model(s)
    with s.scope():
        copy = keras.models.clone_model(ours)
        copy.set_weights(ours.get_weights())
        copy.compile("sgd", "binary_crossentropy")
    lab.equal(fit(batch_size=4)(ours)["loss"], fit(batch_size=4)(copy)["loss"], FLOAT32)


@behaviour(
    "A random operation with an integer as its seed returns the same numbers in all replicas"
)
def _(lab, s):
    found = lab.components(s.run(lambda: keras.random.normal((3,), seed=5)), s)
    lab.equal(found[0], found[1])
    lab.equal(lab.numpy(keras.random.normal((3,), seed=5)), found[0])


@behaviour(
    "A `SeedGenerator` made in a scope draws different numbers in each replica, and the same "
    "numbers if the code runs again"
)
def _(lab, s):
    def draws():
        with s.scope():
            generator = keras.random.SeedGenerator(7)
        step = lambda: keras.random.normal((3,), seed=generator)  # noqa: E731
        return [lab.components(s.run(step), s) for _ in range(2)]

    first, again = draws(), draws()
    lab.equal(first, again)
    numbers = [tuple(one.tolist()) for step in first for one in step]
    lab.equal(4, len(set(numbers)))


@behaviour(
    "The state of a `SeedGenerator` is a variable; if an earlier state is assigned, the same "
    "numbers are drawn again"
)
def _(lab, s):
    with s.scope():
        generator = keras.random.SeedGenerator(7)
    step = lambda: keras.random.normal((3,), seed=generator)  # noqa: E731
    state = ops.convert_to_numpy(generator.state)
    first = lab.components(s.run(step), s)
    generator.state.assign(state)
    lab.equal(first, lab.components(s.run(step), s))


@behaviour(
    "A `SeedGenerator` draws the same numbers in cross-replica context as outside of every scope"
)
def _(lab, s):
    plain = keras.random.SeedGenerator(7)
    with s.scope():
        ours = keras.random.SeedGenerator(7)
        found = keras.random.normal((3,), seed=ours)
    lab.equal(lab.numpy(keras.random.normal((3,), seed=plain)), found)


@behaviour("Dropout drops different units in each replica")
def _(lab, s):
    with s.scope():
        dropout = keras.layers.Dropout(0.5, seed=3)
    value = numbered(s, lambda i: np.ones((1, 64), "float32"))
    first, second = lab.components(s.run(lambda x: dropout(x, training=True), args=(value,)), s)
    lab.check(not np.array_equal(first, second), "other masks")


@behaviour(
    "While `fit`, `evaluate` or `predict` run a model's code, `get_strategy` returns the model's "
    "strategy"
)
def _(lab, s):
    seen = []

    class Layer(keras.layers.Layer):
        def call(self, x):
            here = kd.get_replica_context()
            seen.append((kd.get_strategy() is strategy, kd.has_strategy(), here is not None))
            return x * 2.0

    strategy = lab.strategy(check="off")
    with strategy.scope():
        made = keras.Sequential([Layer(), keras.layers.Dense(1)])
        made.compile("sgd", "mse")
    made.fit(X, Y, verbose=0)
    made.evaluate(X, Y, verbose=0)
    made.predict(X, verbose=0)
    lab.check(seen and all(map(all, seen)), f"{seen}")


@behaviour("A model made and trained outside of every scope is a plain Keras model")
def _(lab, s):
    plain = model(kd.get_strategy())
    lab.check(type(plain) is keras.Sequential, "its own class")
    fit(batch_size=5)(plain)
    lab.equal(1, len(kd.get_strategy().local_results(plain.weights[0])))


def draws(generator, count=2):
    """A step that draws so many numbers, one after another."""
    return lambda: ops.stack([keras.random.uniform((), seed=generator) for _ in range(count)])


def different(lab, s, runs):
    """How many different numbers runs have drawn, in all replicas."""
    return len({float(x) for run in runs for part in lab.components(run(), s) for x in part})


@behaviour(
    "A `SeedGenerator` made outside of the scope, or passed to a compiled function, draws "
    "different numbers in each replica and step"
)
def _(lab, s):
    outside, compiled = keras.random.SeedGenerator(7), kd.function(lambda one: draws(one)())
    with s.scope():
        inside = keras.random.SeedGenerator(7)
    step = draws(outside)
    lab.equal(8, different(lab, s, [lambda: s.run(step), lambda: kd.function(s.run)(step)]))
    lab.equal(8, different(lab, s, [lambda: s.run(lambda: compiled(inside))] * 2))


@behaviour(
    "Random operations in cross-replica context advance the state of the `SeedGenerator` on every "
    "replica"
)
def _(lab, s):
    with s.scope():
        generator = keras.random.SeedGenerator(3)
        for _ in range(2):
            keras.random.normal((3,), seed=generator)
    first, second = lab.components(generator.state, s)
    lab.equal(first, second)
    lab.equal([3, 2], [int(one) for one in first])


@behaviour(
    "If the state of a `SeedGenerator` is assigned under a strategy with more replicas, the first "
    "replicas draw the same numbers"
)
def _(lab, s):
    three, generators = lab.strategy(3), []
    for strategy, seed in ((s, 1), (three, 10)):
        with strategy.scope():
            generators.append(keras.random.SeedGenerator(seed))
    for _ in range(2):
        generators[1].state.assign(ops.convert_to_numpy(generators[0].state))
        expected = lab.components(s.run(draws(generators[0])), s)
        lab.equal(expected, lab.components(three.run(draws(generators[1])), three)[:2])


# What Keras 2 refused with a ValueError.
ADOPTED = "The model takes these objects into its strategy; Keras 2 raises a ValueError."


@behaviour(
    "A model made in the scope has layers, metrics and an optimizer made outside of the scope, and"
    " is compiled outside of the scope",
    tensorflow=ADOPTED,
    jax=ADOPTED,
    torch=ADOPTED,
)
def _(lab, s):
    (plain, _, _), (ours, strategy_s, _) = by_steps(s)
    lab.equal(plain["loss"], ours["loss"], FLOAT32)
    lab.equal(plain["mean_absolute_error"], ours["mean_absolute_error"], FLOAT32)
    for variable in strategy_s.weights:
        first, second = lab.components(variable, s)
        lab.equal(first, second)


@behaviour("`fit` with distributed datasets takes `steps_per_epoch` and `validation_steps`")
def _(lab, s):
    for _, _, seen in by_steps(s):
        lab.equal(["train", "train", "test", "epoch"] * 2, seen)


@behaviour("The validation loss of `fit` is the loss that `evaluate` returns after the epoch")
def _(lab, s):
    _, (history, trained, _) = by_steps(s)
    loss = trained.evaluate(X[:5], Y[:5], verbose=0, return_dict=True)["loss"]
    lab.equal(history["val_loss"][-1], loss, FLOAT32)


_by_steps = []


def by_steps(s):
    """The history, the model and the events of a `fit`, on one device and under a strategy."""
    if not _by_steps or _by_steps[0] is not s:
        _by_steps[:] = s, [fit_by_steps(strategy) for strategy in (kd.get_strategy(), s)]
    return _by_steps[1]


def fit_by_steps(strategy):
    class Batches(keras.utils.PyDataset):
        def __init__(self, size, count):
            super().__init__()
            self.size, self.count = size, count

        def __len__(self):
            return self.count

        def __getitem__(self, index):
            return X[: self.size], Y[: self.size]

    seen = []
    see = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append("epoch"),
        on_train_batch_end=lambda batch, logs: seen.append("train"),
    )
    see.on_test_batch_end = lambda batch, logs=None: seen.append("test")
    keras.utils.set_random_seed(1)
    layer, metric = keras.layers.Dense(1), keras.metrics.MeanAbsoluteError()
    with strategy.scope():
        made = keras.Sequential([keras.Input((3,)), layer])
    made.compile(keras.optimizers.SGD(0.1, clipvalue=0.5), "mse", metrics=[metric])
    train, test = map(strategy.distribute_dataset, (Batches(7, 9), Batches(5, 2)))
    steps = {"steps_per_epoch": 2, "validation_data": test, "validation_steps": 1}
    history = made.fit(train, epochs=2, verbose=0, callbacks=[see], **steps).history
    return history, made, seen
