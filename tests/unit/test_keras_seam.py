"""Tripwires: each place where kerasdist touches private parts of Keras is where it should be.

A failure here means that Keras moved something; `kerasdist/keras_seam/` is the place to mend.
Keras fixes its backend at import, so every backend is looked at in a fresh process.
"""

import json
import os
import subprocess
import sys

import pytest

BACKENDS = ["tensorflow", "jax", "torch"]
TIME_LIMIT_S = 100

PROBE = """
import inspect, json
import keras
from keras.src.backend.common.stateless_scope import in_stateless_scope
from kerasdist import keras_seam

def penalty(rows):
    layer = keras.layers.Dense(1, kernel_initializer="ones", activity_regularizer="l2")
    layer(keras.ops.ones((rows, 1)))
    return float(layer.losses[0])

keras.random.normal((1,))
with keras.StatelessScope():
    scoped = [in_stateless_scope()]
    with keras_seam.outside_stateless_scopes():
        scoped.append(in_stateless_scope())

with keras.StatelessScope(initialize_variables=False):
    waiting = keras.Variable("ones", shape=(), trainable=False)
    states = [keras_seam.stored_value(waiting) is None]
keras_seam.initialize_waiting_variables()
states.append(keras_seam.stored_value(waiting) is None)

print(json.dumps({
    "backend": keras_seam.backend_name(),
    "signatures": {
        f"{hook}: {getattr(owner, '__name__', owner)}.{name}":
            list(inspect.signature(getattr(owner, name)).parameters)
        for hook, places in keras_seam.PLACES.items()
        for owner, name in places
    },
    "hooks": sorted(field for field in keras_seam.Hooks.__dataclass_fields__),
    "places": sorted(keras_seam.PLACES),
    "overridable": [
        name for name in keras_seam.OVERRIDDEN if hasattr(keras_seam.BackendTrainer, name)
    ],
    "overridden": sorted(keras_seam.OVERRIDDEN),
    "own": [
        keras_seam.is_kerass_own(keras.metrics.AUC),
        keras_seam.is_kerass_own(keras.losses.mean_squared_error),
        keras_seam.is_kerass_own(print),
    ],
    "divides_penalty": [
        keras_seam.DIVIDES_ACTIVITY_PENALTY, abs(penalty(4) - penalty(2)) < 1e-6
    ],
    "scoped": scoped,
    "waiting": states,
    "builds": list(inspect.signature(keras_seam.Layer._maybe_build).parameters),
    "generator": type(keras_seam.global_seed_generator()).__name__,
}))
"""

# What the hooks and their callers rely on: the first parameters, in this order.
SIGNATURES = {
    "add_loss": ["self", "loss"],
    "apply": ["self", "grads", "trainable_variables"],
    "assign": ["self", "value"],
    "batch_moments": ["self", "inputs", "mask"],
    "batch_norm_weight": ["self"],
    "clear_losses": ["self"],
    "compile": ["self", "optimizer", "loss"],
    "draw_seed": ["self"],
    "evaluate": ["self", "x", "y", "batch_size"],
    "fit": ["self", "x", "y", "batch_size"],
    "layer_created": ["self"],
    "metric_created": ["self"],
    "model_created": ["self"],
    "own_losses": ["self"],
    "predict": ["self", "x", "batch_size"],
    "reduce_loss": ["values", "sample_weight", "mask", "reduction", "dtype"],
    "scale_by_optimizer": ["self", "loss"],
    "scale_loss": ["value"],
    "unscale_loss": ["value"],
    "update_mean": ["self", "values", "sample_weight"],
    "update_wrapped": ["self", "y_true", "y_pred", "sample_weight"],
    "variable_created": ["self"],  # what else there is, is handed on
}


@pytest.fixture(scope="module", params=BACKENDS)
def probe(request):
    environment = os.environ | {"KERAS_BACKEND": request.param, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{request.param} is missing or broken:\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])


def test_every_place_has_the_parameters_that_the_hooks_use(probe):
    for place, parameters in probe["signatures"].items():
        expected = SIGNATURES[place.partition(":")[0]]
        assert parameters[: len(expected)] == expected, place


def test_every_hook_has_its_place(probe):
    assert probe["hooks"] == probe["places"] == sorted(SIGNATURES)


def test_every_method_that_a_trainer_overrides_by_name_exists(probe):
    # A backend's trainer overrides what its own Keras trainer has.
    elsewhere = {"_maybe_symbolic_build": "tensorflow", "_get_jax_state": "jax"}
    missing = set(probe["overridden"]) - set(probe["overridable"])
    assert missing == {n for n, backend in elsewhere.items() if backend != probe["backend"]}


def test_kerass_own_functions_are_told_from_others(probe):
    assert probe["own"] == [True, True, False]


def test_whether_a_layer_divides_its_activity_penalty_is_known(probe):
    claimed, found = probe["divides_penalty"]
    assert claimed == found


def test_the_state_of_a_thread_is_where_it_was(probe):
    assert probe["scoped"] == [True, False]
    assert probe["generator"] == "SeedGenerator"


def test_variables_made_in_a_stateless_scope_wait_where_they_did(probe):
    assert probe["waiting"] == [True, False]


def test_a_layers_first_call_builds_it_where_it_did(probe):
    assert probe["builds"] == ["self", "call_spec"]
