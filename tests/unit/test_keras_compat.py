"""Tripwires: each place that kerasdist patches in Keras is where it should be.

A failure here means that Keras has moved a part; mend `kerasdist/keras_compat/`.
What a patch does there the suites' cases show, over the oldest Keras too. Keras fixes its backend
at import, so every backend is looked at in a fresh process.
"""

import json

import pytest

from tests.fresh import run_forked

BACKENDS = ["tensorflow", "jax", "torch"]

# The most places of Keras that may be patched in a process.
MOST = 30

PROBE = """
import inspect, json
from collections import Counter
import keras
from kerasdist import keras_compat
from kerasdist.core.internals import Internal, value_at
from kerasdist.keras_compat.patches import PATCHES

here = keras_compat.backend_name()
rows = [patch for patch in PATCHES if here in (patch.backends or (here,))]
signatures, missing = {}, []
for patch in rows:
    try:
        target = value_at(patch.path or "")
    except (AttributeError, ImportError, ValueError):
        is_later = isinstance(patch.target, Internal) and not patch.target.is_gone()
        missing += [] if is_later else [str(patch.target)]
        continue
    parameters = list(inspect.signature(target).parameters) if callable(target) else None
    for function in patch.functions:
        signatures[f"{function}: {patch.path}"] = parameters

settings = [keras_compat.settings()]
with keras.StatelessScope():
    settings.append(keras_compat.settings())
keras.config.set_floatx("float64")
settings.append(keras_compat.settings())
keras.config.set_floatx("float32")
keras.config.set_dtype_policy("mixed_bfloat16")
settings.append(keras_compat.settings())
keras.config.set_dtype_policy("float32")

drawn, ones = [], keras.ops.ones((2, 2))

def noted(original, *args, **kwargs):
    drawn.append(original.__name__)
    return original(*args, **kwargs)

keras_compat.install(draw=noted)
arguments = {
    "beta": [(2,), 1.0, 1.0], "binomial": [(2,), 3.0, 0.5], "categorical": [ones, 1],
    "gamma": [(2,), 1.0], "normal": [(2,)], "randint": [(2,), 0, 3],
    "truncated_normal": [(2,)], "uniform": [(2,)], "dropout": [ones, 0.5], "shuffle": [ones],
}
for name, given in arguments.items():
    getattr(keras.random, name)(*given, seed=3)
keras.layers.GaussianNoise(0.5, seed=2)(ones, training=True)

print(json.dumps({
    "backend": here,
    "signatures": signatures,
    "missing": missing,
    "twice": [path for path, n in Counter(patch.path for patch in rows).items() if n > 1],
    "settings": settings,
    "not drawn": sorted({*arguments} - {*drawn}),
    "draws of a layer": drawn[-1:],
}))
"""

PATCHED = """
import json
import kerasdist as kd

kd.config.set_logical_cpu_devices(2)
import keras
from kerasdist import keras_compat

with kd.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(keras.ops.ones((4, 3)), keras.ops.ones((4, 1)), verbose=0)
print(json.dumps(keras_compat.patched()))
"""

# What the hooks and their callers rely on: the first parameters, in this order.
SIGNATURES = {
    "add_loss": ["self", "loss"],
    "apply": ["self", "grads", "trainable_variables"],
    "apply_mask": ["sample_weight", "mask", "dtype", "reduction"],
    "assign": ["self", "value"],
    "batch_moments": ["self", "inputs", "mask"],
    "batch_norm_called": ["self", "inputs"],
    "batch_norm_created": ["self"],
    "build_symbolically": ["self", "iterator", "data_batch"],
    "call_loss": ["self", "y_true", "y_pred"],
    "clear_losses": ["self"],
    "compile": ["self", "optimizer", "loss"],
    "compute_loss": ["self", "x", "y", "y_pred", "sample_weight"],
    "draw_seed": ["self"],
    "evaluate": ["self", "x"],
    "fit": ["self", "x", "y", "batch_size"],
    "get_metrics_result": ["self"],
    "make_predict_function": ["self", "force"],
    "make_test_function": ["self", "force"],
    "make_train_function": ["self", "force"],
    "metric_created": ["self"],
    "model_created": ["cls"],
    "on_batch": ["self", "x"],
    "reduce_loss": ["values", "sample_weight", "mask", "reduction", "dtype"],
    "save": ["model", "filepath"],
    "scale_by_optimizer": ["self", "loss"],
    "scale_loss": ["value"],
    "unscale_loss": ["value"],
    "variable_created": ["self"],  # what else there is, is handed on
}


@pytest.fixture(scope="module", params=BACKENDS)
def probe(request):
    return json.loads(run_forked(PROBE, request.param).splitlines()[-1])


def test_every_place_has_the_parameters_that_the_hooks_use(probe):
    for place, parameters in probe["signatures"].items():
        expected = SIGNATURES.get(place.partition(":")[0], [])
        assert (parameters or [])[: len(expected)] == expected, place


def test_every_place_is_there_and_has_one_row(probe):
    elsewhere = set() if probe["backend"] == "torch" else {"apply_mask"}
    elsewhere |= {"call_loss", "apply_mask"} if probe["backend"] == "jax" else set()
    found = {place.partition(":")[0] for place in probe["signatures"]}
    assert not set(SIGNATURES) - elsewhere - found
    assert (probe["twice"], probe["missing"]) == ([], [])


def test_settings_are_where_they_were(probe):
    assert probe["settings"] == [
        ["float32", "float32", False],
        ["float32", "float32", True],
        ["float32", "float64", False],
        ["mixed_bfloat16", "float32", False],
    ]


def test_draws_go_where_they_did(probe):
    """What layers and users draw; on JAX nothing has to see it."""
    is_seen = probe["backend"] != "jax"
    assert probe["draws of a layer"] == ["normal"] * is_seen
    assert not is_seen or probe["not drawn"] == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_few_places_of_keras_are_patched(backend):
    patched = json.loads(run_forked(PATCHED, backend).splitlines()[-1])
    assert "keras:Model.__bases__" in patched
    assert len(patched) <= MOST
