"""Tripwires: what kerasdist touches of TensorFlow's private parts is where it should be.

A failure here means that TensorFlow moved something, and a file in
`kerasdist/backends/tensorflow/private/` is to be mended.
"""

import json
from pathlib import Path

import pytest

from tests.fresh import run_fresh

PROBE = """
import contextlib, inspect, json
import kerasdist as kd

kd.config.set_logical_cpu_devices(2)
import keras
import tensorflow as tf
import kerasdist.backends.tensorflow.backend
from kerasdist.backends.tensorflow.private import compiled, patches, scopes, strategies
from tensorflow.python.autograph.core import config as autograph_config
from tensorflow.python.distribute import collective_all_reduce_strategy as multi_worker
from tensorflow.python.distribute import distribute_lib, mirrored_strategy, values_util
from tensorflow.python.distribute import values as distributed_values
from tensorflow.python.eager import context as eager_context
from tensorflow.python.ops import control_flow_util

PRIVATE = (
    autograph_config.DoNotConvert,
    distributed_values.Mirrored,
    distributed_values.DistributedVariable.numpy,
    distributed_values.SyncOnReadVariable._get_cross_replica,
    distributed_values.SyncOnReadVariable.assign,
    control_flow_util.GraphOrParentsInXlaContext,
    tf.__internal__.autograph.control_status_ctx,
    tf.__internal__.autograph.tf_convert,
    tf.__internal__.distribute.interim.maybe_merge_call,
    distribute_lib._get_default_strategy,
    distribute_lib._get_default_replica_mode,
    distribute_lib._push_per_thread_mode,
    distribute_lib._pop_per_thread_mode,
    distribute_lib._ThreadMode,
    eager_context.Context.clear_kernel_cache,
    mirrored_strategy.MirroredExtended._create_variable,
    mirrored_strategy.MirroredExtended._get_replica_id_in_sync_group,
    mirrored_strategy.MirroredExtended._get_variable_creator_initial_value,
    multi_worker.CollectiveAllReduceExtended._initialize_local_devices,
    values_util.assign_on_device,
    values_util.assign_on_each_device,
    values_util.in_replica_update_context,
)
# By which a worker's strategy says that the health check and the server are not wanted.
assert multi_worker.CollectiveAllReduceExtended._enable_check_health is True

native_strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with scopes.NativeScope(native_strategy):
    keras.backend.clear_session()
    after_reset = tf.distribute.get_strategy() is native_strategy
    with scopes.cross_replica_code_without_merge_call():
        inside = [tf.distribute.in_cross_replica_context(), tf.distribute.has_strategy()]

updated = []

@tf.function
def meet_and_update(value):
    # Where the replicas have met, in a branch: there TensorFlow itself refuses.
    def merged(strategy, value):
        with scopes.cross_replica_code_without_merge_call():
            return tf.cond(
                tf.constant(True),
                lambda: tf.__internal__.distribute.interim.maybe_merge_call(
                    lambda strategy: updated.append(strategy) or tf.constant(1.0),
                    tf.distribute.get_strategy(),
                ),
                lambda: tf.constant(0.0),
            )
    return tf.distribute.get_replica_context().merge_call(merged, args=(value,))

native_strategy.run(meet_and_update, args=(tf.constant(2.0),))

keys = [
    strategies.mirrored_strategy(["CPU:0", "CPU:1"], share_memory=True).extended
    for _ in range(2)
]
keys = [extended._collective_key_base for extended in keys]
mirrored = strategies.mirrored([tf.constant(1.0), tf.constant(1.0)])
one = tf.function(lambda: 1, reduce_retracing=True)
likewise = compiled.compiled_likewise(one, lambda: 2)

class Owner:
    @compiled.explained
    @tf.function
    def method(self):
        return 3

owner, entered = Owner(), []
note = lambda place: entered.append(place) or contextlib.nullcontext()
compiled.translating_failures = note
explained = [int(compiled.explained(tf.function(lambda: 2))()), int(owner.method())]
explained.append(int(tf.function(lambda: owner.method() + 1)()))
in_xla = []
plain, xla = (
    tf.function(lambda: in_xla.append(compiled.compiles_with_xla()), jit_compile=xla)
    for xla in (False, True)
)
plain(), xla()

class Own(Exception):
    def __init__(self, one, other):
        super().__init__(one, other)

patches.let_errors_pass(Own)
print(json.dumps({
    "parameters": {
        part.__name__: list(inspect.signature(part).parameters)
        for part in PRIVATE
    },
    "after_reset": after_reset,
    "left": not tf.distribute.has_strategy(),
    "inside": inside,
    "keys": keys,
    "mirrored": isinstance(mirrored, kd.Mirrored) and isinstance(mirrored, kd.DistributedValues),
    "likewise": [int(likewise()), likewise is not one],
    "explained": [explained, len(entered), isinstance(owner.method, type(one))],
    "in_xla": in_xla,
    "passes": Own(1, 2).ag_pass_through,
    "rules": [rule._prefix for rule in autograph_config.CONVERSION_RULES[:2]],
    "updated_once_without_a_strategy": len(updated) == 1 and updated[0] is not native_strategy,
}))
"""


@pytest.fixture(scope="module")
def probe():
    return json.loads(run_fresh(PROBE, KERAS_BACKEND="tensorflow").splitlines()[-1])


def test_the_private_names_take_what_they_are_given(probe):
    assert probe["parameters"] == {
        "DoNotConvert": ["module_prefix"],
        "Mirrored": ["values"],
        "_get_cross_replica": ["self"],
        "assign": ["self", "value", "use_locking", "name", "read_value"],
        "_create_variable": ["self", "next_creator", "kwargs"],
        "_get_variable_creator_initial_value": [
            "self",
            "replica_id",
            "device",
            "primary_var",
            "kwargs",
        ],
        "_initialize_local_devices": ["self", "cluster_resolver", "worker_device"],
        "in_replica_update_context": [],
        "assign_on_device": ["device", "variable", "tensor"],
        "assign_on_each_device": ["var", "assign_func", "value", "read_value"],
        "_get_replica_id_in_sync_group": ["self", "replica_id"],
        "numpy": ["self"],
        "GraphOrParentsInXlaContext": ["graph"],
        "control_status_ctx": [],
        "tf_convert": ["f", "ctx", "convert_by_default", "user_requested"],
        "_get_default_strategy": [],
        "_get_default_replica_mode": [],
        "clear_kernel_cache": ["self"],
        "_push_per_thread_mode": ["context"],
        "_pop_per_thread_mode": [],
        "_ThreadMode": ["dist", "cross", "replica"],
        "maybe_merge_call": ["fn", "strategy", "args", "kwargs"],
    }


def test_a_scope_outlives_clear_session(probe):
    assert probe["after_reset"]
    assert probe["left"]


def test_a_branch_is_updated_without_merge_call(probe):
    assert probe["inside"] == [True, False]
    assert probe["updated_once_without_a_strategy"]


def test_strategies_have_keys_of_their_own(probe):
    first, second = probe["keys"]
    assert second > first > 0


def test_the_frameworks_values_pass_for_ours(probe):
    assert probe["mirrored"]


def test_a_compiled_function_is_compiled_anew(probe):
    assert probe["likewise"] == [2, True]


def test_calls_are_explained_and_the_function_stays_one_of_tensorflows(probe):
    assert probe["explained"] == [[2, 3, 4], 3, True]


def test_xla_is_noticed(probe):
    assert probe["in_xla"] == [False, True]


def test_errors_of_a_class_pass(probe):
    assert probe["passes"]


def test_autograph_passes_over_us(probe):
    assert "kerasdist" in probe["rules"]


def test_only_the_folder_private_imports_private_modules():
    home = Path(__file__).parents[3] / "kerasdist" / "backends" / "tensorflow"
    others = [path for path in home.glob("*.py") if "tensorflow.python" in path.read_text()]
    assert list((home / "private").glob("*.py"))
    assert not others
