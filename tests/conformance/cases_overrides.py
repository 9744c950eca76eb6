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


def make_train_function(own, model, force=False):
    """Counts its calls."""
    model.counts["made"] += 1
    return own(force)


def make_test_function(own, model, force=False):
    """Counts its calls too."""
    model.counts["made"] += 1
    return own(force)


def make_predict_function(own, model, force=False):
    """Counts its calls too."""
    model.counts["made"] += 1
    return own(force)


CHANGES = (
    *(train_step, test_step, predict_step, compute_loss, compute_metrics, get_metrics_result),
    *(reset_metrics, make_train_function, make_test_function, make_predict_function),
)


def with_more(out, more):
    """A step's logs and others; on JAX it returns a state as well."""
    if isinstance(out, tuple):
        return {**out[0], **more(out[0])}, out[1]
    return {**out, **more(out)}


def by_super(change, home):
    """A method that calls `super()`; ``home`` has its class, once that is made."""

    def method(self, *args, **kwargs):
        own = getattr(super(home[0], self), change.__name__)
        return change(own, self, *args, **kwargs)

    return method


def by_name(change):
    """A method that calls Keras's by the name of its class."""

    def method(self, *args, **kwargs):
        own = getattr(keras.Model, change.__name__)
        return change(functools.partial(own, self), self, *args, **kwargs)

    return method


def by_bound_method(change, model):
    """A function for the object, around what the object had."""
    return functools.partial(change, getattr(model, change.__name__), model)


# Where a method stands: on the class, on a class beside Keras's, on the class after the model was
# made, or on the object, as what, and whether before or after `compile`.
WAYS = ("class", "mixin", "by name", "later", "method", "partial", "method after", "closure after")


def built(turn):
    """A compiled model with all `CHANGES`, each in another of the `WAYS`: as many as turns."""
    ways = {change: WAYS[(turn + place) % len(WAYS)] for place, change in enumerate(CHANGES)}
    written = lambda *names: [change for change in CHANGES if ways[change] in names]  # noqa: E731
    home, beside = [], []
    aside = {change.__name__: by_super(change, beside) for change in written("mixin")}
    beside.append(type("Beside", (), aside))
    own = {change.__name__: by_super(change, home) for change in written("class")}
    own |= {change.__name__: by_name(change) for change in written("by name")}

    class Own(beside[0], keras.Sequential):
        @property
        def metrics(self):
            return [*super().metrics, self.more]

    for name, method in own.items():
        setattr(Own, name, method)
    home.append(Own)
    model = Own([keras.Input((X.shape[1],)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.more, model.counts = keras.metrics.Mean(name="more"), {"made": 0}
    for change in written("later"):
        setattr(Own, change.__name__, by_super(change, home))
    for change in written("method"):
        own = getattr(model, change.__name__)
        method = lambda self, *a, _own=own, _do=change, **kw: _do(_own, self, *a, **kw)  # noqa: E731
        setattr(model, change.__name__, types.MethodType(method, model))
    for change in written("partial"):
        setattr(model, change.__name__, by_bound_method(change, model))
    model.compile(keras.optimizers.SGD(0.1, 0.9), "mse", metrics=["mae"])
    for change in written("method after"):
        bound = by_bound_method(change, model)
        method = lambda self, *a, _do=bound, **kw: _do(*a, **kw)  # noqa: E731
        setattr(model, change.__name__, types.MethodType(method, model))
    for change in written("closure after"):
        bound = by_bound_method(change, model)
        setattr(model, change.__name__, lambda *a, _do=bound, **kw: _do(*a, **kw))
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
