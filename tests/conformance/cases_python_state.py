"""What users' code keeps in Python: apart by replica, or found to be shared."""

import contextlib

import numpy as np

from tests.conformance.actions import fit
from tests.conformance.cases_check import CHECKED, warned
from tests.conformance.lab import fresh
from tests.conformance.lazy import kd, keras, torch
from tests.conformance.python_state import APART, SCALE, SHARED, model_of, torch_modes
from tests.conformance.registry import case

TOPIC = "state in Python"
# The last batch has another size.
X, Y = np.random.default_rng(0).normal(size=(14, 3)).astype("float32"), np.ones((14, 1), "float32")


@case(TOPIC, replicas=(2,))
def kept_apart(lab):
    """Tensors and numbers in attributes, containers, objects; tensors in globals and closures."""
    eagerly = lab.backend == "tensorflow"
    trained = fit(X, Y, batch_size=8, shuffle=False, epochs=2)
    lab.same(lambda: model_of(APART.values(), run_eagerly=eagerly), trained)


@case(TOPIC, backends=CHECKED, replicas=(2,))
def counted_by_a_metric(lab):
    """A user's metric that appends to a list takes each batch once."""

    class Batches(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="batches")
            self.seen = []

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.seen.append(1)

        def result(self):
            return keras.ops.convert_to_tensor(float(len(self.seen)))

        def reset_state(self):
            self.seen.clear()

    def build():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[Batches()], run_eagerly=True)
        return model

    lab.same(build, fit(X, Y, batch_size=8, shuffle=False, epochs=2))


@case(TOPIC, backends=CHECKED, replicas=(2,))
def shared_and_found(lab):
    """Iterators, large arrays; numbers in globals, closures, classes: the check finds them."""
    some = [*SHARED.values()]
    for way in some if lab.backend == "torch" else some[-2:]:
        fresh()
        model = lab.made(lambda way=way: model_of([way], run_eagerly=True))
        said = warned(model, (X, Y))
        lab.check(len(said) == 1 and "keeps state in Python" in said[0], f"{way.__name__}: {said}")


@case(TOPIC, replicas=(2,))
def context_variables(lab):
    """Context variables that the caller has set, and callbacks of each batch, where it is eager."""

    class Scaling(keras.layers.Layer):
        def call(self, x):
            return x * SCALE.get()

    class Setting(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            SCALE.set(1.0 + batch)

    def build():
        SCALE.set(3.0)
        layers = [keras.Input((3,)), keras.layers.Dense(2), Scaling(), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse", run_eagerly=lab.backend == "tensorflow")
        return model

    token = SCALE.set(1.0)
    try:
        given = {"batch_size": 8, "shuffle": False}
        callbacks = None if lab.backend == "jax" else lambda: [Setting()]
        lab.same(build, fit(X, Y, **given), fit(X, Y, **given, callbacks=callbacks))
    finally:
        SCALE.reset(token)


@case(TOPIC, backends=("torch",), replicas=(2,))
def modes_of_the_caller(lab):
    """Modes of PyTorch around `fit` and `predict`: devices, autocast, hooks, function modes."""
    for name, (context, is_in_force) in torch_modes().items():
        found = {}

        class Looking(keras.layers.Layer):
            def call(self, x, found=found, is_in_force=is_in_force):
                if not x.is_meta:
                    found[kd.get_replica_context().replica_id_in_sync_group] = is_in_force()
                return x

        fresh()
        model = lab.made(lambda: keras.Sequential([keras.Input((3,)), Looking()]))
        for mode, expected in ((contextlib.nullcontext, False), (context, True)):
            with mode():
                model.predict_on_batch(X)
            lab.check(found == {0: expected, 1: expected}, f"{name}: {found}, not {expected}")
    lab.check(torch.get_default_device().type == "cpu", "a mode is left")
