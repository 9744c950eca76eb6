"""Steps and results of a user's own: what plain Keras would call wins, wherever it is written."""

import functools
import types

import numpy as np

from tests.conformance.compare import FLOAT32
from tests.conformance.lab import optimizer_values, plain_values, values
from tests.conformance.lazy import keras
from tests.conformance.models import regression
from tests.conformance.registry import case

N, BATCH = 11, 4
X, Y = regression(N)


def train_step(own, model, *args):
    """The step's logs and one more."""
    return with_more(own(*args), lambda logs: {"seen": logs["loss"] * 2})


def test_step(own, model, *args):
    """One log of its own."""
    return with_more(own(*args), lambda logs: {"tested": logs["loss"] + 1})


def predict_step(own, model, *args):
    """Other predictions."""
    out = own(*args)
    return (out[0] * 2, out[1]) if isinstance(out, tuple) else out * 2


def compute_loss(own, model, *args, **kwargs):
    """Another loss, and so other gradients."""
    return own(*args, **kwargs) * 0.5


def compute_metrics(own, model, x, y, y_pred, *args, **kwargs):
    """One more metric, which the model's `metrics` has too."""
    model.more.update_state(y_pred)
    return own(x, y, y_pred, *args, **kwargs)


def get_metrics_result(own, model):
    """All results and one more."""
    found = own()
    return {**found, "twice": found["loss"] * 2}


def reset_metrics(own, model):
    """Leaves one metric as it is, which counts on over epochs and calls."""
    kept = [variable.numpy() for variable in model.more.variables]
    own()
    for variable, value in zip(model.more.variables, kept, strict=True):
        variable.assign(value)


def count_makes(own, model, force=False):
    """Counts its calls."""
    model.counts["made"] += 1
    return own(force)


CHANGES = {
    one.__name__: one
    for one in (
        *(train_step, test_step, predict_step, compute_loss, compute_metrics),
        *(get_metrics_result, reset_metrics),
    )
} | {f"make_{one}_function": count_makes for one in ("train", "test", "predict")}


def with_more(out, more):
    """A step's logs and others; on JAX it returns a state as well."""
    if isinstance(out, tuple):
        return {**out[0], **more(out[0])}, out[1]
    return {**out, **more(out)}


def by_super(name, home):
    """A method that calls `super()`; ``home`` has its class, once that is made."""

    def method(self, *args, **kwargs):
        own = getattr(super(home[0], self), name)
        return CHANGES[name](own, self, *args, **kwargs)

    return method


def by_name(name):
    """A method that calls Keras's by the name of its class."""

    def method(self, *args, **kwargs):
        own = getattr(keras.Model, name)
        return CHANGES[name](functools.partial(own, self), self, *args, **kwargs)

    return method


def on_object(way, name, model):
    """What an object is given by this name, around what it had."""
    bound = functools.partial(CHANGES[name], getattr(model, name), model)

    def closure(*args, **kwargs):
        return bound(*args, **kwargs)

    if way == "partial":
        return bound
    if way == "closure after":
        return closure
    return types.MethodType(lambda self, *args, **kwargs: closure(*args, **kwargs), model)


# Where a method stands: on the class, on a class beside Keras's, on the class after the model was
# made, or on the object, as what, and whether before or after `compile`.
WAYS = ("class", "mixin", "by name", "later", "method", "partial", "method after", "closure after")


def built(turn):
    """A compiled model with all `CHANGES`, each in another of the `WAYS`: as many as turns."""
    ways = {name: WAYS[(turn + place) % len(WAYS)] for place, name in enumerate(CHANGES)}
    written = lambda *them: [name for name in CHANGES if ways[name] in them]  # noqa: E731
    home, beside = [], []
    beside.append(type("Beside", (), {name: by_super(name, beside) for name in written("mixin")}))

    class Own(beside[0], keras.Sequential):
        @property
        def metrics(self):
            return [*super().metrics, self.more]

    home.append(Own)
    for name in written("class"):
        setattr(Own, name, by_super(name, home))
    for name in written("by name"):
        setattr(Own, name, by_name(name))
    model = Own([keras.Input((X.shape[1],)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.more, model.counts = keras.metrics.Mean(name="more"), {"made": 0}
    for name in written("later"):
        setattr(Own, name, by_super(name, home))
    for name in written("method", "partial"):
        setattr(model, name, on_object(ways[name], name, model))
    model.compile(keras.optimizers.SGD(0.1, 0.9), "mse", metrics=["mae"])
    for name in written("method after", "closure after"):
        setattr(model, name, on_object(ways[name], name, model))
    return model


def used(model):
    """All that the model shows in `fit`, `evaluate`, `predict`, and with one batch each."""
    keras.utils.set_random_seed(5)
    history = model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0)
    shown = [
        history,
        model.evaluate(X, Y, batch_size=BATCH, verbose=0, return_dict=True),
        model.predict(X, batch_size=BATCH, verbose=0),
        model.train_on_batch(X[:4], Y[:4], return_dict=True),
        model.test_on_batch(X[:5], Y[:5], return_dict=True),
        model.predict_on_batch(X[:3]),
    ]
    return [*map(plain_values, shown), dict(model.counts)]


@case("custom steps", replicas=(2,))
def in_eighty_ways(lab):
    """Ten methods of a model in eight ways of writing each: in a class, a mixin, on the object."""
    keras.utils.set_random_seed(3)
    weights = None
    for turn in range(len(WAYS)):
        plain, ours = built(turn), lab.made(functools.partial(built, turn))
        weights = weights or plain.get_weights()
        shown = []
        for model in (plain, ours):
            model.set_weights(weights)
            shown.append([used(model), values(model.weights), optimizer_values(model)])
        lab.check(np.any(shown[0][1][0] != weights[0]), "plain Keras trains: else nothing is seen")
        lab.equal(*shown, FLOAT32)
