"""Saving and loading: a file is the same with and without a strategy (C3)."""

import copy
import pickle
import tempfile
from pathlib import Path

from tests.conformance.actions import evaluate, fit, predict, quiet_fit
from tests.conformance.compare import ADAPTIVE
from tests.conformance.lazy import keras
from tests.conformance.models import compiled, dense, regression
from tests.conformance.registry import case

N, BATCH = 11, 4
X, Y = regression(N)


def adam():
    return dense(keras.optimizers.Adam(0.02))


def trained_file(lab, folder, strategy, name="model.keras", build=None):
    model = lab.run(build or adam, [quiet_fit(X, Y, batch_size=BATCH)], strategy)[0]
    path = Path(folder) / name
    if name.endswith(".weights.h5"):
        model.save_weights(path)
    else:
        model.save(path)
    return path


@case("saving")
def saved_here_loaded_plain(lab):
    """A registered class that was saved under a strategy is loaded without one, and trains on.

    In a scope it is loaded as the user's class, too.
    """

    @keras.saving.register_keras_serializable(package=f"conformance{lab.replicas}")
    class Own(keras.Model):
        def __init__(self, units=3, **options):
            super().__init__(**options)
            self.units = units
            self.hidden = keras.layers.Dense(units)
            self.out = keras.layers.Dense(1)

        def call(self, x):
            return self.out(self.hidden(x))

        def get_config(self):
            return {**super().get_config(), "units": self.units}

    def build():
        return compiled(Own(4), keras.optimizers.Adam(0.02), "mse")

    strategy = lab.strategy()
    with tempfile.TemporaryDirectory() as folder:
        path = trained_file(lab, folder, strategy, build=build)
        twin = trained_file(lab, folder, None, "plain.keras", build)
        actions = [predict(X), quiet_fit(X, Y, batch_size=BATCH)]
        expected = lab.run(lambda: keras.models.load_model(twin), actions)[1]
        model, actual = lab.run(lambda: keras.models.load_model(path), actions)
        with strategy.scope():
            again = keras.models.load_model(path)
    lab.equal(expected.parts(True), actual.parts(True), ADAPTIVE)
    lab.check(type(model) is Own, f"a model loaded outside of a scope is {type(model)}")
    lab.check(isinstance(again, Own), "a model loaded in a scope is the user's class still")
    lab.equal("Own", type(again).__name__)


@case("saving")
def loaded_in_the_scope(lab):
    """`load_model` inside a scope: a plain file trains on under the strategy, optimizer and all."""
    with tempfile.TemporaryDirectory() as folder:
        path = trained_file(lab, folder, None)
        lab.same(
            lambda: keras.models.load_model(path),
            predict(X, batch_size=3),
            fit(X, Y, batch_size=BATCH),
            evaluate(X, Y, batch_size=BATCH),
            tolerance=ADAPTIVE,
        )


@case("saving")
def saved_in_the_scope(lab):
    """`save` in and out of the scope, `pickle`, `deepcopy`, `to_json`, `summary`: plain Keras's."""
    strategy = lab.strategy()
    plain, ours = lab.run(adam, [])[0], lab.run(adam, [], strategy)[0]
    shown = []
    for model in (plain, ours):
        lines = []
        model.summary(print_fn=lines.append)
        shown.append([lines, model.get_config(), model.to_json(), type(model).__name__])
    lab.equal(*shown)
    with strategy.scope():
        again = keras.Sequential.from_config(ours.get_config())
    lab.equal(plain.count_params(), again.count_params())
    ours.fit(X, Y, batch_size=BATCH, verbose=0)
    copies = [pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)]
    with tempfile.TemporaryDirectory() as folder:
        one, two = Path(folder) / "one.keras", Path(folder) / "two.keras"
        ours.save(one)
        with strategy.scope():
            ours.save(two)
        copies += map(keras.models.load_model, (one, two))
    lab.equal(copies[-1].get_config(), copies[-2].get_config())
    for copied in copies:
        lab.equal(ours.get_weights(), copied.get_weights())
        lab.equal(ours.predict(X, verbose=0), copied.predict(X, verbose=0))


@case("saving")
def weights_files(lab):
    """`save_weights` and `load_weights`, both ways."""
    with tempfile.TemporaryDirectory() as folder:
        ours = trained_file(lab, folder, lab.strategy(), "ours.weights.h5")
        plain = trained_file(lab, folder, None, "plain.weights.h5")

        def load(path):
            def action(model):
                model.load_weights(path)
                return model.get_weights()

            return action

        train = fit(X, Y, batch_size=BATCH)
        strategy = lab.strategy()
        one = lab.run(dense, [load(plain), train, predict(X)])[1]
        two = lab.run(dense, [load(ours), train, predict(X)])[1]
        three = lab.run(dense, [load(plain), train, predict(X)], strategy)[1]
    lab.equal(one.parts(True), two.parts(True), ADAPTIVE)
    lab.equal(one.parts(True), three.parts(True), ADAPTIVE)


@case("saving", like="saving.loaded_in_the_scope")
def cloned(lab):
    """`clone_model` in a scope; outside, a clone of a strategy's model is plain, as all others."""

    def clone_of(model):
        clone = keras.models.clone_model(model)
        clone.set_weights(model.get_weights())
        return compiled(clone, keras.optimizers.SGD(0.1), "mse", metrics=["mae"])

    strategy = lab.strategy()
    source = lab.run(dense, [])[0]
    lab.same(lambda: clone_of(source), fit(X, Y, batch_size=BATCH), strategy=strategy)
    with strategy.scope():
        ours = dense()
    from kerasdist.backends.base.model_trainer import trainer_of

    for plain in (clone_of(ours), dense()):
        lab.check(type(plain) is type(ours) is keras.Sequential, f"Received: {type(plain)}")
        lab.check(trainer_of(plain) is None, "a clone made outside of the scope is plain")
    lab.check(trainer_of(ours) is not None, "a model of the scope has a trainer")
