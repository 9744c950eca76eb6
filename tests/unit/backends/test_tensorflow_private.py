"""Tripwire: what kerasdist touches of TensorFlow's private parts takes what it is given.

A failure here means that TensorFlow changed something, and a file in
`kerasdist/backends/tensorflow/private/` is to be mended. What they do there the suites' cases show.
"""

import json

from tests.fresh import run_forked

PROBE = """
import inspect, json
import tensorflow as tf
from kerasdist.backends.tensorflow import backend, internals
from kerasdist.backends.tensorflow.private import patches
from kerasdist.core.internals import value_at

variable = internals.SYNC_ON_READ_VARIABLE.value
PRIVATE = {
    internals.DO_NOT_CONVERT.value: "module_prefix",
    internals.MIRRORED.value: "values",
    internals.DISTRIBUTED_VARIABLE.value.__init__: "self strategy values aggregation var_policy",
    internals.DISTRIBUTED_VARIABLE.value.numpy: "self",
    internals.READ_SYNC_ON_READ.value: "self",
    variable.assign: "self value use_locking name read_value",
    internals.IN_XLA.value: "graph",
    internals.CONTROL_STATUS.value: "",
    internals.CONVERT.value: "f ctx convert_by_default user_requested",
    tf.__internal__.distribute.interim.maybe_merge_call: "fn strategy args kwargs",
    internals.FUNCTION_CLONE.value: "self python_function",
    internals.UPDATE_CONTEXT.value: "replica_id",
    internals.CREATE_VARIABLE.value: "self next_creator kwargs",
    internals.INITIAL_VALUE.value: "self replica_id device primary_var kwargs",
    internals.LOCAL_DEVICES.value: "self cluster_resolver worker_device",
    internals.IN_UPDATE.value: "",
    internals.ADD_OP_CALLBACK.value: "callback_fn",
    internals.REMOVE_OP_CALLBACK.value: "op_callback",
    internals.DEVICE_GENERATOR.value: "shard_num multi_device_iterator_resource incarnation_id"
    " source_device element_spec iterator_is_anonymous",
}
# By which a worker's strategy says that the health check and the server are not wanted.
assert internals.CHECKS_HEALTH.value is True
# AutoGraph passes over us.
patches.install()
rules = value_at(str(internals.CONVERSION_RULES.path))
assert "kerasdist" in [rule._prefix for rule in rules[:2]]
found = {part: " ".join(inspect.signature(part).parameters) for part in PRIVATE}
print(json.dumps({str(part): found[part] for part in PRIVATE if found[part] != PRIVATE[part]}))
"""


def test_the_private_names_take_what_they_are_given():
    assert json.loads(run_forked(PROBE, "tensorflow").splitlines()[-1]) == {}


CONSTANT = """
import tensorflow as tf
from kerasdist.backends.tensorflow.private.lookups import constant

tf.config.run_functions_eagerly(True)
tf.function(lambda: print(constant(tf.range(3) + 1))).get_concrete_function()
"""


def test_a_constant_of_a_graph_is_known_while_functions_run_eagerly():
    assert run_forked(CONSTANT, "tensorflow").splitlines()[-1] == "[1 2 3]"
