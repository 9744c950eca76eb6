"""What is made outside of the scope, before or after it, and trained by a model of the scope."""

import contextlib
import warnings

import numpy as np

from tests.conformance.actions import evaluate, fit, predict
from tests.conformance.compare import ADAPTIVE
from tests.conformance.lazy import keras
from tests.conformance.models import regression
from tests.conformance.registry import case

N, BATCH = 11, 4
X, Y = regression(N)


def even_weights(model):
    """Weights that do not depend on what was drawn before."""
    for variable in model.weights:
        if "kernel" in variable.name:
            size = int(np.prod(variable.shape))
            variable.assign(np.linspace(-0.5, 0.7, size).reshape(variable.shape))
    return model


def dense(name):
    return keras.layers.Dense(3, activation="tanh", name=name)


def compiled(model, built_by_hand=False):
    optimizer = keras.optimizers.Adam(0.05)
    if built_by_hand:
        optimizer.build(model.trainable_variables)
    model.compile(optimizer, "mse", metrics=["mae"])
    return even_weights(model)


def trains():
    return [fit(X, Y, batch_size=BATCH, shuffle=False, epochs=2), evaluate(X, Y), predict(X)]


@case("from outside the scope")
def layers_added_after_the_scope(lab):
    """`enable_lora` and `model.add` after the scope, and another `compile`."""

    def build():
        return compiled(keras.Sequential([keras.Input((4,)), dense("first")]))

    def extended(model):
        model.layers[0].enable_lora(2)
        model.add(keras.layers.BatchNormalization(name="norm"))
        model.add(keras.layers.Dense(1, name="last"))
        return [action(compiled(model)) for action in trains()[:1]]

    lab.same(build, extended, *trains()[1:])


def backbone():
    layers = [keras.Input((4,)), dense("outside"), keras.layers.BatchNormalization(name="norm")]
    made = even_weights(keras.Sequential(layers, name="backbone"))
    made.predict(np.ones((3, 4), "float32"), verbose=0)  # which compiles, with the old variables
    return made


def on_a_backbone(lab, frozen, built_by_hand=False):

    def build():
        base = made.pop()
        base.trainable = not frozen
        model = keras.Sequential([keras.Input((4,)), base, keras.layers.Dense(1)])
        return compiled(model, built_by_hand)

    def backbone_predicts(model):
        return model.layers[0].predict(X, verbose=0)

    def outcome(strategy=None):
        keras.backend.clear_session(free_memory=False)
        made.append(backbone())
        with warnings.catch_warnings(action="ignore"):  # the backbone itself runs on one device
            return lab.run(build, [*trains(), backbone_predicts], strategy)[1].parts(True)

    made = []
    lab.equal(outcome(), outcome(lab.strategy()))


@case("from outside the scope")
def backbones(lab):
    """A backbone built and used outside, trained inside or frozen, and used again by itself.

    The optimizer is built by hand in the scope, too.
    """
    on_a_backbone(lab, frozen=False)
    on_a_backbone(lab, frozen=True)
    on_a_backbone(lab, frozen=False, built_by_hand=True)


@case("from outside the scope")
def fit_alone_in_the_scope(lab):
    """Made and compiled outside, `fit` in the scope: plain Keras's numbers, with a warning."""

    def build():
        return compiled(keras.Sequential([keras.Input((4,)), dense("a"), keras.layers.Dense(1)]))

    def outcome(scope):
        model = lab.run(build, [])[0]
        with scope(), warnings.catch_warnings(action="ignore"):
            results = [action(model) for action in trains()]
        return [results, model.get_weights()]

    strategy = lab.strategy()
    lab.equal(outcome(contextlib.nullcontext), outcome(strategy.scope))
    lab.still_usable(strategy)


@case("from outside the scope", like="from_outside.layers_added_after_the_scope")
def new_head_after_the_scope(lab):
    """A plain model with a new last layer on the strategy's own layers: trained on one device."""

    def build():
        layers = [keras.Input((4,)), dense("first"), keras.layers.BatchNormalization(name="norm")]
        return compiled(keras.Sequential([*layers, keras.layers.Dense(1, name="last")]))

    def with_new_head(model):
        model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
        head = keras.layers.Dense(1, name="head")
        tuned = compiled(keras.Model(model.inputs, head(model.layers[-2].output)))
        return [[action(tuned) for action in trains()], tuned.get_weights()]

    lab.same(build, with_new_head, *trains(), tolerance=ADAPTIVE)
