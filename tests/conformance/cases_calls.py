"""500 calls, drawn from a seed, of a model in the scope and of one outside, beside each other.

On TensorFlow and JAX, which trace or compile much for them, `make test-slow` has one in twenty.
"""

import contextlib

import numpy as np

from tests.conformance.calls import calls
from tests.conformance.compare import FLOAT32
from tests.conformance.lab import fresh, optimizer_values, plain_values
from tests.conformance.lazy import keras
from tests.conformance.models import classifier
from tests.conformance.registry import case
from tests.environment import everything

NUMBER = 500
# After so many calls both begin again, so that rounding does not add up.
EVERY = 10


def model_in(scope):
    fresh()
    with scope:
        model = classifier(
            keras.optimizers.SGD(0.05, momentum=0.5),
            weighted_metrics=["sparse_categorical_crossentropy"],
        )
        model.optimizer.build(model.trainable_variables)
    return model


def state(model):
    return [model.get_weights(), optimizer_values(model)]


def begin_again(model, first):
    weights, optimizer = first
    model.set_weights(weights)
    for variable, value in zip(model.optimizer.variables, optimizer, strict=True):
        variable.assign(value)
    model.reset_metrics()


def outcome(call, model):
    """(result, None), or (None, error)."""
    try:
        return plain_values(getattr(model, call.method)(**call.arguments)), None
    except Exception as error:  # noqa: BLE001 (the other model must raise its like)
        return None, error


def complaint(expected, received):
    """What is wrong with how a call in the scope ended; Keras's and Python's errors stay theirs."""
    if expected is None or received is None:
        return "" if expected is received else f"expected {expected!r}, received {received!r}"
    own = next((kind for kind in (ValueError, TypeError) if isinstance(expected, kind)), Exception)
    return "" if isinstance(received, own) else f"expected {expected!r}, received {received!r}"


@case("generated", replicas=(2, 3))
def beside_plain_keras(lab):
    """500 calls of `fit`, `evaluate` and the like, with mistakes: the numbers of plain Keras."""
    plain = model_in(contextlib.nullcontext())
    mirrored = model_in(lab.strategy().scope())
    first, wrong, raised = state(plain), [], 0
    twice = zip(calls(lab.backend, NUMBER), calls(lab.backend, NUMBER), strict=True)
    every = 1 if lab.backend == "torch" else 4 if everything() else 20
    for number, (call, again) in [*enumerate(twice)][::every]:
        if isinstance(weights := call.arguments.get("sample_weight"), list):
            # Of a list Keras gives the loss all numbers, and weighted metrics the first (3.15.1).
            call.arguments["sample_weight"] = np.array(weights, "float32")
        expected, error = outcome(call, plain)
        received, other = outcome(again, mirrored)
        found = complaint(error, other)
        raised += error is not None
        if not found and error is None:
            try:
                lab.equal([expected, state(plain)], [received, state(mirrored)], FLOAT32)
            except AssertionError as differs:
                found = str(differs)
        if found:
            wrong.append(f"call {number}, {call}: {found}")
        if found or error is not None or number % EVERY < every:
            begin_again(plain, first)
            begin_again(mirrored, first)
    lab.check(not wrong, f"{len(wrong)} calls differ:\n" + "\n".join(wrong[:20]))
    lab.check(raised > NUMBER // every // 30, f"only {raised} calls were mistakes")
