"""Tripwire: what kerasdist touches of TensorFlow's private parts takes what it is given.

A failure here means that TensorFlow moved something, and a file in
`kerasdist/backends/tensorflow/private/` is to be mended. What they do there the suites' cases show.
"""

import json
from pathlib import Path

from tests.fresh import run_forked

PROBE = """
import inspect, json
import tensorflow as tf
from tensorflow.python.autograph.core import config as autograph_config
from tensorflow.python.distribute import collective_all_reduce_strategy as multi_worker
from tensorflow.python.distribute import distribute_lib, mirrored_strategy, values_util
from tensorflow.python.distribute import values as distributed_values
from tensorflow.python.eager import context as eager_context
from tensorflow.python.ops import control_flow_util
import kerasdist.backends.tensorflow.backend

Extended = mirrored_strategy.MirroredExtended
Workers = multi_worker.CollectiveAllReduceExtended
PRIVATE = {
    autograph_config.DoNotConvert: "module_prefix",
    distributed_values.Mirrored: "values",
    distributed_values.DistributedVariable.numpy: "self",
    distributed_values.SyncOnReadVariable._get_cross_replica: "self",
    distributed_values.SyncOnReadVariable.assign: "self value use_locking name read_value",
    control_flow_util.GraphOrParentsInXlaContext: "graph",
    tf.__internal__.autograph.control_status_ctx: "",
    tf.__internal__.autograph.tf_convert: "f ctx convert_by_default user_requested",
    tf.__internal__.distribute.interim.maybe_merge_call: "fn strategy args kwargs",
    distribute_lib._get_default_strategy: "",
    distribute_lib._get_default_replica_mode: "",
    distribute_lib._push_per_thread_mode: "context",
    distribute_lib._pop_per_thread_mode: "",
    distribute_lib._ThreadMode: "dist cross replica",
    eager_context.Context.clear_kernel_cache: "self",
    Extended._create_variable: "self next_creator kwargs",
    Extended._get_replica_id_in_sync_group: "self replica_id",
    Extended._get_variable_creator_initial_value: "self replica_id device primary_var kwargs",
    Workers._initialize_local_devices: "self cluster_resolver worker_device",
    values_util.assign_on_device: "device variable tensor",
    values_util.assign_on_each_device: "var assign_func value read_value",
    values_util.in_replica_update_context: "",
}
# By which a worker's strategy says that the health check and the server are not wanted.
assert Workers._enable_check_health is True
# AutoGraph passes over us.
assert "kerasdist" in [rule._prefix for rule in autograph_config.CONVERSION_RULES[:2]]
found = {part: " ".join(inspect.signature(part).parameters) for part in PRIVATE}
print(json.dumps({str(part): found[part] for part in PRIVATE if found[part] != PRIVATE[part]}))
"""


def test_the_private_names_take_what_they_are_given():
    assert json.loads(run_forked(PROBE, "tensorflow").splitlines()[-1]) == {}


def test_only_the_folder_private_imports_private_modules():
    home = Path(__file__).parents[3] / "kerasdist" / "backends" / "tensorflow"
    files = [path for path in home.rglob("*.py") if "tensorflow.python" in path.read_text("utf-8")]
    assert {path.parent.name for path in files} == {"private"}
