"""Tripwires: each place where kerasdist touches private parts of Keras is where it should be.

A failure here means that Keras moved something; `kerasdist/keras_compat/` is the place to mend.
Keras fixes its backend at import, so every backend is looked at in a fresh process.
"""

import json

import pytest

from tests.fresh import run_forked
from tests.unit.probe_of_trials import TRIALS

BACKENDS = ["tensorflow", "jax", "torch"]

PROBE = """
import inspect, json
from collections import Counter
from operator import attrgetter
import keras
from keras.src.models.model import Trainer as BackendTrainer
from keras.src.tree import dmtree_impl
from keras.src.backend.common.stateless_scope import in_stateless_scope
from kerasdist import keras_compat
from kerasdist.keras_compat.patches import PATCHES
import numpy as np

keras.utils.set_random_seed(41)
seed = keras_compat.global_seed()

resumed = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
resumed.compile("sgd", "mse")
trained, read = [], []

class Resume(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        keras_compat.set_initial_epoch(resumed, 1)
    def on_epoch_begin(self, epoch, logs=None):
        read.append([epoch])
        if epoch == 1:
            keras_compat.skip_batches(resumed, 2, 0, {}, lambda: read.append("skipped"))
    def on_train_batch_end(self, batch, logs=None):
        trained.append(int(keras.ops.convert_to_numpy(self.model.optimizer.iterations)))

rows = np.ones((8, 2), "float32")
resumed.fit(rows, rows[:, :1], batch_size=2, epochs=3, verbose=0, callbacks=[Resume()])


def penalty(rows):
    layer = keras.layers.Dense(1, kernel_initializer="ones", activity_regularizer="l2")
    layer(keras.ops.ones((rows, 1)))
    return float(layer.losses[0])

keras.random.normal((1,))
with keras.StatelessScope():
    scoped = [in_stateless_scope()]
    with keras_compat.outside_stateless_scopes():
        scoped.append(in_stateless_scope())

settings = [keras_compat.settings()]
with keras.StatelessScope():
    settings.append(keras_compat.settings())
keras.config.set_floatx("float64")
settings.append(keras_compat.settings())
keras.config.set_floatx("float32")
keras.config.set_dtype_policy("mixed_bfloat16")
settings.append(keras_compat.settings())
keras.config.set_dtype_policy("float32")

with keras.StatelessScope(initialize_variables=False):
    waiting = keras.Variable("ones", shape=(), trainable=False)
    states = [keras_compat.stored_value(waiting) is None]
keras_compat.initialize_waiting_variables()
states.append(keras_compat.stored_value(waiting) is None)

class Pair:
    def __init__(self, parts):
        self.parts = parts

keras_compat.register_tree_node(Pair, lambda pair: pair.parts)
doubled = keras.tree.map_structure(lambda part: 2 * part, [Pair((1, 2)), 3])
trees = [
    keras.tree.flatten(doubled),
    type(doubled[0]) is Pair,
    type(keras.tree.pack_sequence_as(doubled, [1, 2, 3])[0].parts) is tuple,
    [list(path) for path, _ in keras.tree.flatten_with_path(doubled)],
]

try:
    refused = keras.layers.BatchNormalization(synchronized=True) is None
except ValueError:
    refused = True

# What one framework needs; put in last, since it stays.
told, reads, applied = {}, [], []
v = keras.Variable(3.0, name="v")
keras_compat.install(read=lambda read, variable: reads.append(variable.name) or read(variable))
told["read"] = [float(v.value), float(v + 1), float(keras.ops.add(v, 2))]
told["reads"] = list(reads)

def scaled_apply(original, optimizer, grads, trainable_variables=None):
    applied.append([optimizer is scaling, len(grads), trainable_variables[0] is v])
    # Keras's own fails on JAX outside of a stateless function; that is what the hook is for.
    on_jax = keras_compat.backend_name() == "jax"
    apply = keras_compat.apply_scaled_gradients if on_jax else original
    apply(optimizer, list(grads), trainable_variables)

keras_compat.install(apply_scaled=scaled_apply)
scaling = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
scaling.build([v])
scaling.apply([keras.ops.convert_to_tensor(4.0)], [v])
told["applied"] = [*applied, float(v.value)]

if keras_compat.backend_name() == "torch":
    in_nn = {}

    def look_at(name):
        def hook(original, *args, **kwargs):
            in_nn[name] = list(inspect.signature(original).parameters)
            return original(*args, **kwargs)

        return hook

    keras_compat.install(nn_normalization=look_at("batch_normalization"))
    keras.layers.BatchNormalization()(keras.ops.ones((1, 3, 3, 1)), training=True)
    told["in nn"] = in_nn

"""

REPORT = """
signatures, missing = {}, []
targets = Counter(target for patch in PATCHES for target in patch.targets)
with keras.name_scope("other"):
    made_by = [keras_compat.is_of_optimizer()]
class Noting(keras.optimizers.SGD):
    def build(self, variables):
        super().build(variables)
        self.add_variable(
            (1,), lambda *args, **_: made_by.append(keras_compat.is_of_optimizer()) or np.ones(1)
        )
Noting().build([v])
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

class Subclassed(keras.Model):
    def call(self, inputs):
        return inputs["a"] + inputs["b"]
subclassed = Subclassed()
subclassed({"a": np.ones((4, 3)), "b": np.ones((4, 3))})

print(json.dumps({
    "examples": [
        [[one.shape, one.dtype] for one in keras.tree.flatten(keras_compat.shapes_of_example(each))]
        for each in (resumed, keras.Model(resumed.inputs[0], resumed.outputs[0]), subclassed)
    ],
    "trials": trials,
    "seed": seed,
    "resumed": [read, trained, keras_compat.initial_epoch(resumed)],
    "default": [
        keras_compat.models.is_default(keras.callbacks.Callback().on_train_batch_end),
        keras_compat.models.is_default(Resume().on_train_batch_end),
    ],
    "backend": keras_compat.backend_name(),
    "signatures": signatures,
    "missing": missing,
    "twice": [f"{owner}.{name}" for (owner, name), count in targets.items() if count > 1],
    "overridable": [
        name for name in keras_compat.patches.OVERRIDDEN if hasattr(BackendTrainer, name)
    ],
    "overridden": sorted(keras_compat.patches.OVERRIDDEN),
    "own": [
        keras_compat.is_builtin(keras.metrics.AUC),
        keras_compat.is_builtin(keras.losses.mean_squared_error),
        keras_compat.is_builtin(print),
    ],
    "divides_penalty": [
        keras_compat.DIVIDES_ACTIVITY_PENALTY, abs(penalty(4) - penalty(2)) < 1e-6
    ],
    "scoped": scoped,
    "settings": settings,
    "waiting": states,
    "generator": type(keras_compat.global_seed_generator()).__name__,
    "trees": trees,
    "dmtree": list(inspect.signature(dmtree_impl.register_tree_node).parameters),
    "synchronized": [keras_compat.KNOWS_SYNCHRONIZED, not refused],
    "batch_norm": list(inspect.signature(keras.layers.BatchNormalization.__init__).parameters),
    "told": told,
    "made_by": made_by,
    # Keras 3.16 on torch has two more places: its own DistributedDataParallel.
    "number": len(targets) - 2 * keras_compat.HAS_DDP,
}))
"""

# What the hooks and their callers rely on: the first parameters, in this order.
SIGNATURES = {
    "add_loss": ["self", "loss"],
    "apply": ["self", "grads", "trainable_variables"],
    "assign": ["self", "value"],
    "batch_moments": ["self", "inputs", "mask"],
    "batch_norm_called": ["self", "inputs"],
    "batch_norm_created": ["self"],
    "batch_norm_weight": ["self"],
    "clear_losses": ["self"],
    "compile": ["self", "optimizer", "loss"],
    "draw_seed": ["self"],
    "evaluate": ["self", "x"],
    "fit": ["self", "x", "y", "batch_size"],
    "metric_created": ["self"],
    "model_created": ["self"],
    "on_batch": ["self", "x"],
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
    return json.loads(run_forked(PROBE + TRIALS + REPORT, request.param).splitlines()[-1])


def test_every_place_has_the_parameters_that_the_hooks_use(probe):
    for place, parameters in probe["signatures"].items():
        expected = SIGNATURES.get(place.partition(":")[0], [])
        assert (parameters or [])[: len(expected)] == expected, place


def test_every_target_is_there_and_patched_by_one_row(probe):
    assert {place.partition(":")[0] for place in probe["signatures"]} >= set(SIGNATURES)
    assert not probe["twice"]
    assert probe["number"] <= 48  # move 6 of the redesign: nobody raises it
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


def test_kerass_own_functions_are_told_from_others(probe):
    assert probe["own"] == [True, True, False]


def test_whether_a_layer_divides_its_activity_penalty_is_known(probe):
    claimed, found = probe["divides_penalty"]
    assert claimed == found


def test_the_state_of_a_thread_is_where_it_was(probe):
    assert probe["scoped"] == [True, False]
    assert probe["generator"] == "SeedGenerator"


def test_settings_are_where_they_were(probe):
    assert probe["settings"] == [
        ["float32", "float32", False],
        ["float32", "float32", True],
        ["float32", "float64", False],
        ["mixed_bfloat16", "float32", False],
    ]


def test_variables_made_in_a_stateless_scope_wait_where_they_did(probe):
    assert probe["waiting"] == [True, False]


def test_keras_tree_learns_of_a_class(probe):
    leaves, kind, made_of_a_tuple, paths = probe["trees"]
    assert leaves == [2, 4, 6]
    assert kind
    assert made_of_a_tuple
    assert paths == [[0, 0], [0, 1], [1]]


def test_the_other_library_that_keras_walks_by_is_told_likewise(probe):
    assert probe["dmtree"] == ["cls", "flatten_func", "unflatten_func"]


def test_where_keras_synchronizes_batch_normalization_is_known(probe):
    claimed, found = probe["synchronized"]
    assert claimed == found
    assert "synchronized" in probe["batch_norm"]


def test_reads_are_noticed(probe):
    assert probe["told"]["read"] == [3.0, 4.0, 5.0]
    assert len(probe["told"]["reads"]) >= 3
    assert set(probe["told"]["reads"]) == {"v"}


def test_an_optimizer_names_what_it_makes(probe):
    assert probe["made_by"] == [False, True]


def test_an_optimizer_that_scales_applies_where_it_did(probe):
    assert probe["told"]["applied"] == [[True, 1, True], 2.0]


def test_the_seed_of_a_process_is_known(probe):
    assert probe["seed"] == 41


def test_where_torch_computes_what_layers_have_in_common(probe):
    channels = ["x", "mean", "variance", "axis", "offset", "scale", "epsilon"]
    told = {"batch_normalization": channels}
    assert probe["told"].get("in nn") == (told if probe["backend"] == "torch" else None)


def test_fit_goes_on_in_an_epoch_behind_batches_that_are_only_read(probe):
    read, trained, initial_epoch = probe["resumed"]
    assert initial_epoch == 1
    assert read == [[1], "skipped", [2]]
    assert trained == [0, 0, 1, 2, 3, 4, 5, 6]


def test_a_model_says_what_an_example_is_like(probe):
    of_two = [[[1, 2], "float32"]]
    assert probe["examples"] == [of_two, of_two, [[[1, 3], "float32"]] * 2]


def test_a_callback_that_does_nothing_is_recognised(probe):
    assert probe["default"] == [True, False]


def test_what_a_trial_of_a_step_steps_into_is_where_it_was(probe):
    trials = probe["trials"]
    assert trials["by layers"] == ["dropout", "normal", "uniform"]
    assert trials["public"]


def test_what_a_trial_reads_of_a_model_and_a_step_is_where_it_was(probe):
    trials = probe["trials"]
    assert trials["compiled"] == ["mae", [["mae"], ["mse"]]]
    assert trials["logs"] == {"loss": 1.0}
    assert trials["batch"] == [[8, 2], [8, 1], [8]]
    assert trials["seeds"] == 2
