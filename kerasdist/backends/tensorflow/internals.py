"""What kerasdist holds on to in TensorFlow that is not public: each internal once, by its use."""

from __future__ import annotations

from kerasdist.core.internals import EVERY_VERSION, Internal

_FUNCTION = "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function"
_DISTRIBUTE = "tensorflow.python.distribute"
_WORKERS = f"{_DISTRIBUTE}.collective_all_reduce_strategy:CollectiveAllReduceExtended"
_CONTEXT = "tensorflow.python.eager.context:Context"
_GENERATOR = "tensorflow.python.data.ops.multi_device_iterator_ops:_PerDeviceGenerator"
_AUTOGRAPH = "tensorflow.python.autograph"


def _internal(path: str, feature: str, without: str, *, in_each_fit: bool = False) -> Internal:
    """Declares what all supported versions have under one name."""
    return Internal(
        {path: EVERY_VERSION}, feature=feature, without=without, in_each_fit=in_each_fit
    )


_REFUSED = "refused"

# Functions that users have compiled, and those that AutoGraph converts.

_CONVERTED = "strategy.run, merge_call and update, whose functions AutoGraph may convert"
CONTROL_STATUS = _internal(
    "tensorflow:__internal__.autograph.control_status_ctx", _CONVERTED, _REFUSED
)
CONVERT = _internal("tensorflow:__internal__.autograph.tf_convert", _CONVERTED, _REFUSED)

_SLOWER = "AutoGraph converts the package's own code as well: graphs are traced more slowly"
AUTOGRAPH_CONFIG = _internal(f"{_AUTOGRAPH}.core:config", "tracing custom loops fast", _SLOWER)
CONVERSION_RULES = _internal(
    f"{_AUTOGRAPH}.core.config:CONVERSION_RULES", "tracing custom loops fast", _SLOWER
)
DO_NOT_CONVERT = _internal(
    f"{_AUTOGRAPH}.core.config:DoNotConvert", "tracing custom loops fast", _SLOWER
)

_OWN_FUNCTION = "a train_step, test_step or predict_step that is decorated with tf.function"
FUNCTION_AUTOGRAPH = _internal(f"{_FUNCTION}._autograph", _OWN_FUNCTION, _REFUSED)
CONVERTED_FUNCTION = _internal(
    "tensorflow.python.eager.polymorphic_function.autograph_util:py_func_from_autograph",
    _OWN_FUNCTION,
    _REFUSED,
)
CONTROL_STATUS_CONTEXT = _internal(
    f"{_AUTOGRAPH}.core.ag_ctx:ControlStatusCtx", _OWN_FUNCTION, _REFUSED
)
STATUS_ENABLED = _internal(f"{_AUTOGRAPH}.core.ag_ctx:Status.ENABLED", _OWN_FUNCTION, _REFUSED)
FUNCTION_JIT_COMPILE = _internal(
    f"{_FUNCTION}._jit_compile",
    "the warning that a step decorated with jit_compile=True runs without XLA",
    "no warning",
)
FUNCTION_CLONE = _internal(
    f"{_FUNCTION}._clone", "strategy.run of a function that is decorated with tf.function", _REFUSED
)
IN_XLA = _internal(
    "tensorflow.python.ops.control_flow_util:GraphOrParentsInXlaContext",
    "the error that strategy.run cannot be compiled by XLA",
    "it is not refused: what XLA cannot compile, it refuses itself",
)

# Scopes and strategies.

_COMPARED = "the comparison of a step with one device"
_NOT_COMPARED = "fit warns that its first step is not compared; compare_with_one_device is refused"

STRATEGY_STACK = _internal(
    "tensorflow:Graph._distribution_strategy_stack",
    "an optimizer's step on several devices",
    _REFUSED,
    in_each_fit=True,
)
CREATOR_STACK = _internal(
    "tensorflow:Graph._variable_creator_stack",
    f"several workers, and {_COMPARED}",
    f"workers are refused; {_NOT_COMPARED}",
)
UPDATE_CONTEXT = _internal(
    f"{_DISTRIBUTE}.distribute_lib:UpdateContext",
    f"an optimizer's step on several GPUs, and {_COMPARED}",
    f"refused on GPUs; {_NOT_COMPARED}",
)
COLLECTIVE_KEY_BASE = _internal(
    "tensorflow:distribute.MirroredStrategy._collective_key_base",
    "a second strategy of several devices in a process",
    "refused; the first one works",
)
MIRRORED = _internal(
    f"{_DISTRIBUTE}.values:Mirrored",
    "sums on several GPUs, and in custom loops reduce_to, broadcast and their like",
    _REFUSED,
)
INPUT_DEVICES = _internal(
    f"{_DISTRIBUTE}.mirrored_strategy:MirroredExtended._input_workers_devices",
    "a distributed dataset with a pipeline for each replica",
    _REFUSED,
)
DISTRIBUTED_VARIABLE = _internal(
    f"{_DISTRIBUTE}.values:DistributedVariable",
    "int(), float(), bool() and np.array() of a mirrored variable",
    "TensorFlow refuses them; bool() is always true",
)
VARIABLE_POLICY = _internal(
    f"{_DISTRIBUTE}.values:DistributedVariable._policy", _COMPARED, _NOT_COMPARED
)
UNIQUE_ID = _internal(
    "tensorflow.python.ops.resource_variable_ops:BaseResourceVariable._unique_id",
    _COMPARED,
    _NOT_COMPARED,
)

# Data on GPUs, and gradients of lookups in eager steps.

_AHEAD = "batches that wait on GPUs before the steps that take them"
_NOT_AHEAD = "batches wait on the host: steps on GPUs are slower"
DEVICE_GENERATOR = _internal(_GENERATOR, _AHEAD, _NOT_AHEAD)
GENERATOR_BEGIN = _internal(f"{_GENERATOR}._init_func", _AHEAD, _NOT_AHEAD)
GENERATOR_NEXT = _internal(f"{_GENERATOR}._next_func", _AHEAD, _NOT_AHEAD)
GENERATOR_END = _internal(f"{_GENERATOR}._finalize_func", _AHEAD, _NOT_AHEAD)

_EAGER_LOOKUPS = "sparse gradients of steps with run_eagerly=True, or of a compared first step"
ADD_OP_CALLBACK = _internal(
    "tensorflow.python.framework.op_callbacks:add_op_callback", _EAGER_LOOKUPS, _REFUSED
)
REMOVE_OP_CALLBACK = _internal(
    "tensorflow.python.framework.op_callbacks:remove_op_callback", _EAGER_LOOKUPS, _REFUSED
)

# Workers.

_SEVERAL_WORKERS = "several workers"
EAGER_CONTEXT = _internal("tensorflow.python.eager.context:context", _SEVERAL_WORKERS, _REFUSED)
CONFIGURE_COLLECTIVES = _internal(
    f"{_CONTEXT}.configure_collective_ops", _SEVERAL_WORKERS, _REFUSED
)
CONFIGURE_COORDINATION = _internal(
    f"{_CONTEXT}.configure_coordination_service", _SEVERAL_WORKERS, _REFUSED
)
ENABLE_COLLECTIVES = _internal(f"{_CONTEXT}.enable_collective_ops", _SEVERAL_WORKERS, _REFUSED)
RUNTIME_CONFIG = _internal(f"{_CONTEXT}.config", _SEVERAL_WORKERS, _REFUSED)
START_RUNTIME = _internal(f"{_CONTEXT}.ensure_initialized", _SEVERAL_WORKERS, _REFUSED)
WORKERS_EXTENDED = _internal(_WORKERS, _SEVERAL_WORKERS, _REFUSED)
CHECKS_HEALTH = _internal(f"{_WORKERS}._enable_check_health", _SEVERAL_WORKERS, _REFUSED)
SERVER_STARTED = _internal(f"{_WORKERS}._std_server_started", _SEVERAL_WORKERS, _REFUSED)
LOCAL_DEVICES = _internal(f"{_WORKERS}._initialize_local_devices", _SEVERAL_WORKERS, _REFUSED)
WORKERS_INITIAL_VALUE = _internal(
    f"{_WORKERS}._get_variable_creator_initial_value", _SEVERAL_WORKERS, _REFUSED
)
INITIAL_VALUE = _internal(
    f"{_DISTRIBUTE}.mirrored_strategy:MirroredExtended._get_variable_creator_initial_value",
    _SEVERAL_WORKERS,
    _REFUSED,
)
CREATE_VARIABLE = _internal(f"{_WORKERS}._create_variable", _SEVERAL_WORKERS, _REFUSED)
SYNC_ON_READ_VARIABLE = _internal(
    f"{_DISTRIBUTE}.values:SyncOnReadVariable", _SEVERAL_WORKERS, _REFUSED
)
READ_SYNC_ON_READ = _internal(
    f"{_DISTRIBUTE}.values:SyncOnReadVariable._get_cross_replica", _SEVERAL_WORKERS, _REFUSED
)
IN_UPDATE = _internal(
    f"{_DISTRIBUTE}.values_util:in_replica_update_context", _SEVERAL_WORKERS, _REFUSED
)

# Profiles.

XPLANE = _internal(
    "tensorflow.tsl.profiler.protobuf.xplane_pb2:XSpace", "a profile of a run's steps", _REFUSED
)
