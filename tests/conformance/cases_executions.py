"""Executions of several steps (`steps_per_execution`): ragged ends, odd batches, callbacks."""

import contextlib
import sys
from unittest import mock

import numpy as np

from tests.conformance import interruptions
from tests.conformance.actions import evaluate, fit, predict, quiet_fit
from tests.conformance.interruptions import InterruptionError, network
from tests.conformance.lab import SEED, values
from tests.conformance.lazy import kd, keras
from tests.conformance.models import compiled, dataset_of, dense, regression, stack, weights_for
from tests.conformance.registry import case

TOPIC = "steps per execution"
BATCH = 4


def equals_single_steps(lab, actions, steps, build=dense, strategy=None):
    """Several steps in an execution under the strategy, one in plain Keras: no number differs."""
    expected = lab.run(build, actions)[1]
    made = lambda: build(steps_per_execution=steps)  # noqa: E731
    actual = lab.run(made, actions, strategy or lab.strategy())[1]
    lab.equal(expected.parts(True), actual.parts(True))


@case(TOPIC)
def ragged_ends(lab):
    """Fewer steps at the end, a last batch of another size, both, fewer batches than steps."""
    x, y = regression(24)
    weights, options = weights_for(22) + 0.1, {"batch_size": BATCH}
    beside = {"validation_data": (x[:15], y[:15]), "shuffle": False, **options}
    actions = (
        quiet_fit(x[:22], y[:22], epochs=2, sample_weight=weights, **beside),
        evaluate(x, y, **options),
        predict(x[:15], **options),
        predict(x[:6], **options),
    )
    equals_single_steps(lab, actions, 4)


def uses(x, y):
    train = quiet_fit(x, y, batch_size=BATCH, shuffle=False)
    return train, evaluate(x, y, batch_size=BATCH), predict(x, batch_size=BATCH)


def of_forms(forms):
    """Batches by their numbers, of these numbers of rows and columns."""
    random = np.random.default_rng(3)
    batches = [random.normal(size=(*form, 2)).astype("float32") for form in forms]
    return lambda index: (batches[index], batches[index].sum(axis=(1, 2))[:, None])


def summing(**options):
    pool = keras.layers.GlobalAveragePooling1D()
    return stack([keras.layers.Dense(3), pool, keras.layers.Dense(1)], inputs=(None, 2), **options)


@case(TOPIC)
def batches_that_differ(lab):
    """Batches of other sizes and shapes in an execution, alike in one and other in the next."""
    forms = [(4, 3), (6, 2), (4, 3), *[(4, 5)] * 5, (4, 3), (1, 3), (4, 2)]
    train = quiet_fit(lambda: dataset_of(of_forms(forms), len(forms)), shuffle=False)
    equals_single_steps(lab, [train], 3, summing)


@case(TOPIC, replicas=(2,))
def sparse_inputs(lab):
    """Sparse inputs."""
    import scipy.sparse

    x, y = regression(22)
    rows = scipy.sparse.csr_matrix(np.where(x > 0, x, 0))

    def build(**options):
        # Plain Keras on torch has no sparse tensors, and makes dense arrays of SciPy's matrices.
        inputs = keras.Input(x.shape[1:], sparse=lab.backend != "torch")
        return stack([keras.layers.Dense(3), keras.layers.Dense(1)], inputs=inputs, **options)

    equals_single_steps(lab, uses(rows, y), 3, build)


# TensorFlow reads ahead, so that plain Keras itself sees values that a source has written later.
@case(TOPIC, backends=("jax", "torch"), replicas=(2,))
def a_source_that_overwrites_its_batch(lab):
    """A `PyDataset` that gives the same arrays for each batch, with other values."""
    if lab.backend == "jax" and lab.keras_version < (3, 15):  # it reads ahead there, too
        return
    batches = [regression(BATCH, seed=seed) for seed in range(7)]
    x, y = map(np.empty_like, batches[0])

    def overwritten(index):
        x[:], y[:] = batches[index]
        return x, y

    expected, actual = (
        lambda batch=batch: dataset_of(batch, len(batches))
        for batch in (batches.__getitem__, overwritten)
    )
    plain = lab.run(dense, [quiet_fit(expected, shuffle=False)])[1]
    build = lambda: dense(steps_per_execution=3)  # noqa: E731
    ours = lab.run(build, [quiet_fit(actual, shuffle=False)], lab.strategy())[1]
    lab.equal(plain.parts(True), ours.parts(True))


@case(TOPIC, backends=("tensorflow", "jax"))
def events_of_callbacks(lab):
    """Callbacks hear of executions with the numbers and logs of plain Keras, and stop after one."""
    x, y = regression(27)
    events = ("train_batch_begin", "train_batch_end", "test_batch_begin", "test_batch_end")

    class Noting(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.heard = []
            for event in (*events, "predict_batch_begin", "predict_batch_end"):
                setattr(self, f"on_{event}", self.noting(event))

        def noting(self, event):
            def note(batch, logs=None):
                told = {name: value for name, value in (logs or {}).items() if name != "outputs"}
                self.heard.append([event, batch, told])

            return note

    def noted(call):
        def action(model):
            noting = Noting()
            result = call(model, [noting])
            return [result, noting.heard]

        return action

    def stopping(model):
        stop = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: setattr(model, "stop_training", batch > 3)
        )
        noting = Noting()
        model.fit(x, y, batch_size=BATCH, epochs=3, callbacks=[stop, noting], verbose=0)
        return [noting.heard, int(model.optimizer.iterations)]

    options = {"batch_size": BATCH, "verbose": 0}
    lab.same(
        lambda: dense(steps_per_execution=3),
        noted(lambda m, c: m.fit(x, y, callbacks=c, validation_data=(x, y), **options).history),
        noted(lambda m, c: m.evaluate(x, y, callbacks=c, **options)),
        noted(lambda m, c: m.predict(x, callbacks=c, **options)),
        stopping,
        fit(
            x,
            y,
            epochs=5,
            batch_size=BATCH,
            callbacks=lambda: [keras.callbacks.EarlyStopping("loss", min_delta=9.0)],
        ),
    )


@contextlib.contextmanager
def programs():
    """Counts the programs of steps that run, each of which consumes the state that it is given."""
    jax = sys.modules["jax"]  # as `lab` has imported it
    counted, jit = [], jax.jit

    class Counting:
        def __init__(self, program):
            self._program = program

        def __call__(self, *args):
            result = self._program(*args)
            counted.append(self._program)
            return result

        def __getattr__(self, name):
            return getattr(self._program, name)

    def counting(function, **options):
        program = jit(function, **options)
        return Counting(program) if options.get("donate_argnums") == 0 else program

    with mock.patch.object(jax, "jit", counting):
        yield counted


@case(TOPIC, backends=("jax",))
def one_program(lab):
    """The steps of an execution are one program; a ragged batch at its end is one of its own."""
    model = lab.made(lambda: dense(steps_per_execution=4))
    x, y = regression(47)
    options = {"batch_size": BATCH, "verbose": 0}
    with programs() as counted:
        model.fit(x[:32], y[:32], **options)
        lab.equal(2, len(counted))
        model.fit(x, y, epochs=2, **options)  # twice 4, 4, 3 and a ragged one
        lab.equal(2 + 2 * 4, len(counted))
        model.evaluate(x[:32], y[:32], **options)
        model.predict(x[:32], **options)
        lab.equal(10 + 2 * 2, len(counted))
        model.fit(x[:36], y[:36], **options)  # and a single step
        lab.equal(14 + 3, len(counted))


@case(TOPIC, replicas=(2,))
def central_storage(lab):
    """`CentralStorageStrategy`, whose state is on the mesh while an execution runs."""
    x, y = regression(30)
    strategy = kd.CentralStorageStrategy(lab.devices, "cpu:0")
    equals_single_steps(lab, uses(x, y), 3, strategy=strategy)


@case(TOPIC, backends=("jax",), replicas=(2,))
def steps_that_xla_cannot_repeat(lab):
    """A user's step that returns the state in other containers, or as other types."""

    def model_of(change):
        class Own(keras.Sequential):
            def train_step(self, state, data):
                logs, (*others, metrics) = super().train_step(state, data)
                return logs, change(others, metrics)

        def build(**options):
            layers = [keras.layers.Dense(3), keras.layers.Dense(1)]
            return compiled(Own([keras.Input((4,)), *layers]), "sgd", "mse", **options)

        return build

    def narrow(others, metrics):
        return *others, [one.astype("float16") for one in metrics]

    x, y = regression(24)
    actions = [quiet_fit(x, y, batch_size=BATCH)]
    ways = ((lambda others, metrics: [*map(tuple, others), metrics], 2), (narrow, 6))
    for change, count in ways:
        build = model_of(change)
        expected = lab.run(build, actions)[1]
        with programs() as counted:
            model = lambda build=build: build(steps_per_execution=3)  # noqa: E731
            actual = lab.run(model, actions, lab.strategy())[1]
        lab.equal(expected.parts(True), actual.parts(True))
        lab.equal(count, len(counted))


@case(TOPIC, backends=("jax",), replicas=(2,))
def a_source_that_fails(lab):
    """A source fails in the middle of an execution: the weights are those of the one before."""
    batches = [regression(BATCH, seed=seed) for seed in range(6)]

    def failing():
        yield from batches[:4]
        raise InterruptionError

    build = lambda: dense(steps_per_execution=3)  # noqa: E731
    strategy = lab.strategy()
    expected, _ = lab.run(build, [quiet_fit(lambda: (one for one in batches[:3]))], strategy)
    model, _ = lab.run(build, [], strategy)
    keras.utils.set_random_seed(SEED + 1)
    with lab.raises(InterruptionError, ""):
        model.fit(failing(), verbose=0)
    lab.equal(values(expected.weights), values(model.weights))
    model.fit((one for one in batches), verbose=0)


@case(TOPIC, replicas=(2,), like="restarts.several_steps")
def restarted_within_an_execution(lab):
    """A source that fails as the second batch of an execution is read; the run goes on exactly."""
    rows = [regression(BATCH, seed=seed) for seed in range(interruptions.BATCHES)]

    def data(fails_at=None):
        read = [0]

        def batch(index):
            read[0] += 1
            if read[0] == fails_at:
                raise InterruptionError
            return rows[index]

        return lambda: {"x": dataset_of(batch, len(rows)), "shuffle": False}

    build = lambda: network(steps_per_execution=3)  # noqa: E731
    with lab.folder() as whole, lab.folder() as torn:
        expected = interruptions.run(lab, whole, data(), build=build)
        failed = False
        try:
            interruptions.run(lab, torn, data(14), build=build)
        except Exception:  # noqa: BLE001  TensorFlow's own, around the source's
            failed = True
        lab.check(failed, "the source did not fail")
        found = interruptions.run(lab, torn, data(), build=build)
        lab.everyone("trained")
    for name, one in expected.items():
        same = interruptions.same(found[name], one)
        lab.check(same, f"{name}: {found[name]} instead of {one}")
