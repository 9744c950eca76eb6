"""Tripwires: each place that kerasdist patches in Keras is where it should be.

A failure here means that Keras moved something; `kerasdist/keras_compat/` is the place to mend.
What a patch does there the suites' cases show, over the oldest Keras too. Keras fixes its backend
at import, so every backend is looked at in a fresh process.
"""

import json

import pytest

from tests.fresh import run_forked

BACKENDS = ["tensorflow", "jax", "torch"]

# Private methods of Keras's trainers that a backend's trainer overrides by name, and why.
OVERRIDDEN = {
    "_compute_loss": "on torch: its value is looked at, and a vector stays one in a replica",
    "_get_metrics_result_or_logs": "on torch: once an epoch, to look at the losses of the replicas",
    "_symbolic_build": "what it makes belongs to the strategy",
    "_maybe_symbolic_build": "on TensorFlow it would take a batch from the data, then lost",
    "_get_jax_state": "on JAX it hands out the state, which must be on the replicas' devices",
}

PROBE = (
    f"OVERRIDDEN = {OVERRIDDEN}"
    + """
import inspect, json
from collections import Counter
from operator import attrgetter
import keras
from keras.src.models.model import Trainer as BackendTrainer
from kerasdist import keras_compat
from kerasdist.keras_compat.patches import PATCHES

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

signatures, missing = {}, []
targets = Counter(target for patch in PATCHES for target in patch.targets)
for patch in PATCHES:
    for owner, name in patch.targets:
        try:
            target = attrgetter(name)(owner)
        except AttributeError:
            missing.append(name)
            continue
        parameters = list(inspect.signature(target).parameters) if callable(target) else None
        for function in patch.functions:
            signatures[f"{function}: {getattr(owner, '__name__', owner)}.{name}"] = parameters

print(json.dumps({
    "backend": keras_compat.backend_name(),
    "signatures": signatures,
    "missing": missing,
    "twice": [f"{owner}.{name}" for (owner, name), count in targets.items() if count > 1],
    "overridable": [
        name for name in OVERRIDDEN if hasattr(BackendTrainer, name)
    ],
    "overridden": sorted(OVERRIDDEN),
    "settings": settings,
    "not drawn": sorted({*arguments} - {*drawn}),
    "draws of a layer": drawn[-1],
    # Keras 3.16 on torch has two more places: its own DistributedDataParallel.
    "number": len(targets) - 2 * keras_compat.HAS_DDP,
}))
"""
)

# What the hooks and their callers rely on: the first parameters, in this order.
SIGNATURES = {
    "add_loss": ["self", "loss"],
    "apply": ["self", "grads", "trainable_variables"],
    "assign": ["self", "value"],
    "batch_moments": ["self", "inputs", "mask"],
    "batch_norm_called": ["self", "inputs"],
    "batch_norm_created": ["self"],
    "batch_norm_weight": ["self"],
    "call_loss": ["self", "y_true", "y_pred"],
    "clear_losses": ["self"],
    "compile": ["self", "optimizer", "loss"],
    "draw_seed": ["self"],
    "evaluate": ["self", "x"],
    "fit": ["self", "x", "y", "batch_size"],
    "metric_created": ["self"],
    "model_created": ["self"],
    "on_batch": ["self", "x"],
    "pair_targets": ["self", "y_true", "y_pred", "sample_weight"],
    "reduce_loss": ["values", "sample_weight", "mask", "reduction", "dtype"],
    "save": ["model", "filepath"],
    "scale_by_optimizer": ["self", "loss"],
    "scale_loss": ["value"],
    "unscale_loss": ["value"],
    "reduce_values": ["values", "sample_weight"],
    "update_wrapped": ["self", "y_true", "y_pred", "sample_weight"],
    "variable_created": ["self"],  # what else there is, is handed on
}


@pytest.fixture(scope="module", params=BACKENDS)
def probe(request):
    return json.loads(run_forked(PROBE, request.param).splitlines()[-1])


def test_every_place_has_the_parameters_that_the_hooks_use(probe):
    for place, parameters in probe["signatures"].items():
        expected = SIGNATURES.get(place.partition(":")[0], [])
        assert (parameters or [])[: len(expected)] == expected, place


def test_every_target_is_there_and_patched_by_one_row(probe):
    assert {place.partition(":")[0] for place in probe["signatures"]} >= set(SIGNATURES)
    assert not probe["twice"]
    assert probe["number"] <= 50  # as HOUSE.md allows
    on_torch_alone = {
        "named_parameters",
        "TorchModuleWrapper.parameters",
        "TorchModuleWrapper.call",
        "core.custom_gradient.__call__",
        "_track_variables",
    }
    elsewhere = {"torch": on_torch_alone, "jax": {"_distribute_data"}}
    elsewhere.pop(probe["backend"], None)
    assert set(probe["missing"]) <= set().union(*elsewhere.values())


def test_every_method_that_a_trainer_overrides_by_name_exists(probe):
    # A backend's trainer overrides what its own Keras trainer has.
    elsewhere = {"_maybe_symbolic_build": "tensorflow", "_get_jax_state": "jax"}
    missing = set(probe["overridden"]) - set(probe["overridable"])
    assert missing == {n for n, backend in elsewhere.items() if backend != probe["backend"]}


def test_settings_are_where_they_were(probe):
    assert probe["settings"] == [
        ["float32", "float32", False],
        ["float32", "float32", True],
        ["float32", "float64", False],
        ["mixed_bfloat16", "float32", False],
    ]


def test_draws_go_where_they_did(probe):
    """What layers and users draw."""
    assert (probe["not drawn"], probe["draws of a layer"]) == ([], "normal")
