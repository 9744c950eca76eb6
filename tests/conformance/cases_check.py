"""What is not one device's is found at the first batch, and nothing else is."""

import contextlib
import functools
import gc
import logging
import warnings
from unittest import mock

import numpy as np

from tests.conformance import threads
from tests.conformance.actions import fit
from tests.conformance.lab import MIXES, fresh, logged, values
from tests.conformance.lazy import kd, keras, tf
from tests.conformance.mixing import EXAMPLES, added_sum, supervised_contrastive
from tests.conformance.models import regression
from tests.conformance.registry import case
from tests.conformance.steps import of as steps_of
from tests.conformance.unmixing import MODELS, network, residual
from tests.environment import everything


def replicas_of(model):
    from kerasdist.backends.base.model_trainer import trainer_of

    return type(trainer_of(model).replicas)


TOPIC, CHECKED = "the first-batch check", ("tensorflow", "torch")  # JAX has no need


def warned(model, batch, **options):
    """What `fit` on one batch says about one device."""
    keras.utils.set_random_seed(5)
    with warnings.catch_warnings(record=True, action="always") as said:
        model.fit(*batch, **{"batch_size": 12, "shuffle": False, "verbose": 0, **options})
    return [str(one.message) for one in said if MIXES in str(one.message)]


@contextlib.contextmanager
def checked(level=logging.DEBUG):
    """What the check did, by its lines of a level and above: one that finds nothing is at DEBUG."""
    checks = []
    with logged(level) as lines:
        yield checks
    checks += ["compared" if " equals " in line else line for line in lines]


# The same place in a step mixes the examples. What is repaired is like what mixes none.
LIKE = {supervised_contrastive: "check.named_entities_found", added_sum: "check.choices"}


def example_case(build, repaired: bool):
    def check(lab):
        fresh()
        model, batch = lab.made(lambda: build(lab.backend, repaired=repaired))
        report = kd.compare_with_one_device(model, *batch)
        said = warned(model, batch)
        if repaired:
            lab.check(report.equal, f"nothing should differ, received: {report}")
            lab.check(not said, f"nothing should be said, received: {said}")
        else:
            lab.check(not report.equal, f"it should differ, received: {report}")
            lab.check(len(said) == 1, f"one warning should come, received: {said}")
            lab.check("global_batch" in said[0], f"it should say what to do, received: {said}")
            lab.check("mixing.py" in said[0] or "steps_" in said[0], f"no place, received: {said}")
            lab.check(not warned(model, batch), "it should be said once")

    kind = "repaired" if repaired else "as published"
    title = f"{build.__doc__.partition(':')[0].rstrip('.')}, {kind}"
    name = f"{build.__name__}_{'repaired' if repaired else 'found'}"
    like = "check.silent" if repaired else LIKE.get(build, "")
    options = {"name": name, "title": title, "like": like}
    case(TOPIC, backends=CHECKED, replicas=(2, 3), **options)(check)


for _build in EXAMPLES:
    example_case(_build, repaired=False)
    example_case(_build, repaired=True)


@case(TOPIC, backends=CHECKED, replicas=(2,))
def along_the_examples(lab):
    """Layers along the examples, activations that are no functions, a loss by `__call__`."""
    layers, softmax = keras.layers, functools.partial(keras.ops.softmax, axis=0)

    class Spread(keras.losses.Loss):
        def __call__(self, y_true, y_pred, sample_weight=None):
            return keras.ops.std(y_pred - y_true)

    def along_the_features():
        layer = layers.Dense(4)
        layer.axis = np.array([1, 2])
        return layer

    for name, layer in {
        "Softmax": lambda: layers.Softmax(axis=0),
        "UnitNormalization": lambda: layers.UnitNormalization(axis=[-2, -1]),
        "partial": lambda: layers.Dense(4, activation=softmax),
    }.items():
        fresh()
        model = lab.made(lambda layer=layer: network(layer(), loss="mse"))
        [said] = warned(model, regression(11))
        lab.check(f"look: {name}." in said, f"it should name {name}, received: {said}")
    fresh()
    [said] = warned(lab.made(lambda: network(layers.Dense(4), loss=Spread())), regression(11))
    lab.check("Spread.__call__" in said, f"it should name the loss, received: {said}")
    fresh()
    model = lab.made(lambda: network(along_the_features(), loss="mse"))
    lab.check(not warned(model, regression(11)), "no axis is that of the examples")


@case(TOPIC, backends=CHECKED, replicas=(2, 3))
def silent(lab):
    """Nothing is said of models that draw, and mix no examples."""
    complaints = []
    # Each number of replicas has half of them: a model takes a second.
    for name, (build, data) in list(MODELS.items())[lab.replicas % 2 :: 2]:
        fresh()
        model = lab.made(build)
        model.run_eagerly = True  # a graph of each would take longest
        with checked() as checks:
            said = warned(model, data())
        if said or checks != ["compared"]:
            complaints.append(f"{name}: {checks} {said}")
    lab.check(not complaints, "\n".join(complaints))


@case(TOPIC, replicas=(2,))
def no_traces(lab):
    """`kd.compare_with_one_device` leaves no traces: training goes on as if without."""
    x, y = regression(11)

    def compared(model):
        before = values([*model.variables, *model.optimizer.variables])
        report = kd.compare_with_one_device(model, x, y)
        lab.check(report.equal, f"nothing should differ, received: {report}")
        after = values([*model.variables, *model.optimizer.variables])
        lab.check(all(map(np.array_equal, before, after)), "a variable has changed")

    def outcome(compares):
        fresh()
        model = lab.made(residual, check="off")
        model.fit(x, y, batch_size=6, verbose=0)
        if compares:
            compared(model)
        model.fit(x, y, batch_size=6, verbose=0)
        return values(model.variables)

    alike = map(np.array_equal, outcome(compares=False), outcome(compares=True))
    lab.check(all(alike), "training goes on in another way")


@case(TOPIC, replicas=(2,))
def choices(lab):
    """`check="raise"`, `"off"`, what is none of them; JAX has no need."""
    said = {}
    for choice in ("raise", "off", "warn"):
        fresh()
        model, batch = lab.made(lambda: added_sum(lab.backend, repaired=False), check=choice)
        try:
            said[choice] = len(warned(model, batch))
        except kd.errors.NotOneDeviceError as error:
            said[choice] = "differs" if MIXES in str(error) else str(error)
            with lab.raises(kd.errors.NotOneDeviceError, MIXES):
                model.train_on_batch(*batch)
    needed = lab.backend != "jax"
    expected = {"raise": "differs", "off": 0, "warn": 1} if needed else dict.fromkeys(said, 0)
    lab.check(said == expected, f"expected {expected}, received {said}")
    lab.check(kd.compare_with_one_device(model, *batch).equal != needed, "the report disagrees")
    if needed:  # of a large batch some examples do
        model.make_train_function(force=True)
        [x], y = model.inputs, np.zeros((40 * lab.replicas, 1), "float32")
        x = np.ones((len(y), x.shape[1]), "float32")
        said = warned(model, (x, y), batch_size=len(y))
        lab.check(len(said) == 1 and f"40 of the {len(y)} examples" in said[0], said)
    with lab.raises(ValueError, r"Expected check to be one of .*Received: check='loud'"):
        lab.strategy(check="loud")


@case(TOPIC, backends=CHECKED, replicas=(2,))
def built_by_step(lab):
    """A user's layer that the first step builds: the check leaves it built"""

    def build():
        model = steps_of(lab.backend).judged_model()()
        model.compile(keras.optimizers.SGD(0.1))
        return model

    lab.same(build, fit(*regression(11), batch_size=6, epochs=2))


@case(TOPIC, replicas=(2,))
def other_threads(lab):
    """Other threads' variables, optimizers and draws are left alone."""
    fresh()
    other = threads.Other()
    model = lab.made(lambda: threads.waiting_model(other))
    with checked() as checks:
        model.fit(*threads.data(), batch_size=6, epochs=2, verbose=0)
    lab.equal(checks, ["compared", "compared"] if lab.backend != "jax" else [])
    lab.check(other.turns > 2, f"{other.turns} turns")
    lab.check(not other.complaints, "\n".join(other.complaints))


@case(TOPIC, replicas=(2,))
def two_fits(lab):
    """Two threads that fit two models under one strategy, both right."""
    fresh()
    start, found = threads.fit_together(lab.strategy())
    if lab.backend == "tensorflow":
        lab.check(not tf.config.functions_run_eagerly(), "the check leaves functions eager")
    for weights, received in zip(start, found, strict=True):
        lab.check(isinstance(received, list), f"{received!r}")
        fresh()
        model = threads.waiting_model(None)
        model(threads.data()[0][:2])
        model.set_weights(weights)
        model.fit(*threads.data(), batch_size=6, epochs=2, shuffle=False, verbose=0)
        lab.equal(model.get_weights(), received)


def per_word(repaired: bool):
    """A model whose loss is divided by the sum of the weights that its targets hold."""
    everyone = kd.global_batch if repaired else (lambda tensor: tensor)

    def loss(y_true, y_pred):
        y_true, y_pred = everyone(y_true), everyone(y_pred)
        weights = y_true[:, 1]
        squares = keras.ops.square(y_true[:, 0] - y_pred[:, 0])
        return keras.ops.sum(weights * squares) / keras.ops.sum(weights)

    return network(loss=loss)


@case(TOPIC, backends=CHECKED, replicas=(2, 3))
def later_batch(lab):
    """A first batch that weighs evenly, and a ragged one that does not."""
    x, y = regression(31)
    rows = np.arange(31)
    weights = np.where(rows < 24, 1.0, rows % 5).astype("float32")
    batch = x, np.concatenate([y, weights[:, None]], axis=1)
    every = ((False, 1), (True, 2), (False, 2), (True, 1))
    for repaired, steps in every if everything() else every[:2]:
        fresh()
        model = lab.made(lambda repaired=repaired: per_word(repaired))
        model.steps_per_execution = steps
        with checked() as checks:
            said = warned(model, batch)
        if repaired:
            lab.equal([said, checks], [[], ["compared", "compared"]])
        else:
            lab.equal(len(said), 1)
            lab.check("For a later batch, of 7 examples" in said[0], said)
            lab.check("per_word" in said[0], said)


@case(TOPIC, backends=CHECKED, replicas=(2,))
def metrics_beside(lab):
    """A metric that draws does not end it; one may return its variable."""

    class Ties(keras.metrics.Metric):
        def __init__(self, name):
            super().__init__(name=name)
            self.value = self.add_variable((), "zeros", name="value")

        def update_state(self, y_true, y_pred, sample_weight=None):
            noise = keras.random.uniform((len(y_pred),) if lab.backend == "torch" else (3,))
            self.value.assign_add(keras.ops.sum(noise) + float(np.random.rand()))

        def result(self):
            return self.value

    class Value(Ties):
        def update_state(self, y_true, y_pred, sample_weight=None):
            self.value.assign_add(keras.ops.sum(keras.ops.abs(y_true - y_pred)))

        def result(self):
            return self.value.value

    def drawing(y_true, y_pred):
        noise = keras.random.normal(keras.ops.shape(y_pred), stddev=0.1)
        return keras.ops.abs(y_true - y_pred - noise)[:, 0]

    def metrics():
        return [Ties("ties"), Value("value"), drawing]

    for mixes in (False, True):
        fresh()

        def loss(y_true, y_pred):
            squares = keras.ops.square(y_true - y_pred)
            return keras.ops.sum(squares) if mixes else keras.ops.mean(squares)  # noqa: B023

        model = lab.made(lambda: network(loss=loss, metrics=metrics()))
        model.run_eagerly = True
        with checked() as checks:
            said = warned(model, regression(11))
        if mixes:
            lab.equal(len(said), 1)
            lab.check("loss: " in said[0], said)
        else:
            lab.equal([said, checks], [[], ["compared"]])


@case(TOPIC, backends=CHECKED, replicas=(2,), like="check.later_batch")
def little_memory(lab):
    """Without room for copies it is left out, and one line says so."""
    for free, level, expected in (
        (10_000_000, logging.DEBUG, "compared"),
        (1_000, logging.INFO, "not compared with one device: copies"),
    ):
        fresh()
        model = lab.made(residual)
        with (
            checked(level) as checks,
            mock.patch.object(replicas_of(model), "free_bytes", return_value=free),
        ):
            said = warned(model, regression(11))
        lab.equal(said, [])
        lab.check(len(checks) == 1 and expected in checks[0], checks)

    calls = []

    def loss(y_true, y_pred):
        calls.append(y_true.shape[0])
        if len(calls) > 1 and calls[-1] == 11:  # on one device alone; the first call is symbolic
            raise MemoryError("no room for 11 rows")
        return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)

    fresh()
    model = lab.made(lambda: network(loss=loss))
    model.run_eagerly = True
    with checked(logging.INFO) as checks:
        warned(model, regression(11))
    lab.check(len(checks) == 1 and "for lack of memory: no room" in checks[0], checks)


@case(TOPIC, backends=CHECKED, replicas=(2,), like="check.later_batch")
def copies_are_freed(lab):
    """On accelerators no copy of the state outlives the comparison, or one without memory."""

    def alive():
        names = ("Tensor", "EagerTensor")
        tensors = [one for one in gc.get_objects() if type(one).__name__ in names]
        return sum(one.shape == (6, 37) for one in tensors)

    def leaves_nothing(too_many, expected):
        sizes = []

        def loss(y_true, y_pred):
            sizes.append(y_true.shape[0])
            if len(sizes) > 1 and sizes[-1] == too_many:  # the first call is symbolic
                raise MemoryError("no room")
            return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)

        fresh()
        model = lab.made(lambda: network(keras.layers.Dense(37), loss=loss))
        accelerators = mock.patch.object(replicas_of(model), "on_cpu", False)
        gc.collect()
        gc.disable()
        try:
            with checked(logging.DEBUG) as checks, accelerators:
                warned(model, regression(11))
            found = alive()
        finally:
            gc.enable()
        gc.collect()
        lab.equal(alive(), found)
        lab.check(expected in checks[0], checks)

    leaves_nothing(0, "compared")
    leaves_nothing(11, "for lack of memory: no room")
