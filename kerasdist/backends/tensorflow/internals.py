"""The functions and classes of TensorFlow that are not public and that kerasdist needs."""

from __future__ import annotations

from kerasdist.core.internals import EVERY_VERSION, Internal

_CONTEXT = "tensorflow.python.eager.context:Context"
_EAGER = "tensorflow.python.eager.polymorphic_function"
_FUNCTION = f"{_EAGER}.polymorphic_function:Function"
_AUTOGRAPH = "tensorflow.python.autograph.core"
_CALLBACKS = "tensorflow.python.framework.op_callbacks"
_GENERATOR = "tensorflow.python.data.ops.multi_device_iterator_ops:_PerDeviceGenerator"
_RESOURCE = "tensorflow.python.ops.resource_variable_ops:BaseResourceVariable"
_DISTRIBUTE = "tensorflow.python.distribute"
_VALUES = f"{_DISTRIBUTE}.values"
_MIRRORED = f"{_DISTRIBUTE}.mirrored_strategy:MirroredExtended"
_WORKERS = f"{_DISTRIBUTE}.collective_all_reduce_strategy:CollectiveAllReduceExtended"


def _internal(path: str, use: tuple[str, str], *, in_each_fit: bool = False) -> Internal:
    """Declares an internal with one name in all versions; `use`: feature, and effect of a lack."""
    feature, without = use
    return Internal({path: EVERY_VERSION}, feature, without, in_each_fit=in_each_fit)


# Functions that users have compiled, and functions that AutoGraph converts.

_CONVERTS = "strategy.run, merge_call and update, whose functions AutoGraph may convert", "refused"
CONTROL_STATUS = _internal("tensorflow:__internal__.autograph.control_status_ctx", _CONVERTS)
CONVERT = _internal("tensorflow:__internal__.autograph.tf_convert", _CONVERTS)

_PASSES_OVER = "tracing a custom loop fast", "AutoGraph converts the package's own code as well"
CONVERSION_RULES = _internal(f"{_AUTOGRAPH}.config:CONVERSION_RULES", _PASSES_OVER)
DO_NOT_CONVERT = _internal(f"{_AUTOGRAPH}.config:DoNotConvert", _PASSES_OVER)

_DECORATED = "a train_step, test_step or predict_step decorated with tf.function", "refused"
FUNCTION_AUTOGRAPH = _internal(f"{_FUNCTION}._autograph", _DECORATED)
CONVERTED_FUNCTION = _internal(f"{_EAGER}.autograph_util:py_func_from_autograph", _DECORATED)
CONTROL_STATUS_CONTEXT = _internal(f"{_AUTOGRAPH}.ag_ctx:ControlStatusCtx", _DECORATED)
STATUS_ENABLED = _internal(f"{_AUTOGRAPH}.ag_ctx:Status.ENABLED", _DECORATED)
FUNCTION_CLONE = _internal(
    f"{_FUNCTION}._clone", ("strategy.run of a function decorated with tf.function", "refused")
)
FUNCTION_JIT_COMPILE = _internal(
    f"{_FUNCTION}._jit_compile",
    ("the warning that a step decorated with jit_compile=True runs without XLA", "no warning"),
)
IN_XLA = _internal(
    "tensorflow.python.ops.control_flow_util:GraphOrParentsInXlaContext",
    (
        "the error that XLA cannot compile strategy.run",
        "it is not refused: what XLA cannot compile, it refuses itself",
    ),
)

# Scopes and strategies.

_COMPARED = "the comparison of a step with one device"
_NOT_COMPARED = "fit warns that its first step is not compared; compare_with_one_device is refused"
STRATEGY_STACK = _internal(
    "tensorflow:Graph._distribution_strategy_stack",
    ("an optimizer's step on several devices", "refused"),
    in_each_fit=True,
)
CREATOR_STACK = _internal(
    "tensorflow:Graph._variable_creator_stack",
    (f"several workers, and {_COMPARED}", f"workers are refused; {_NOT_COMPARED}"),
)
UPDATE_CONTEXT = _internal(
    f"{_DISTRIBUTE}.distribute_lib:UpdateContext",
    (f"an optimizer's step on several GPUs, and {_COMPARED}", f"refused on GPUs; {_NOT_COMPARED}"),
)
VARIABLE_POLICY = _internal(f"{_VALUES}:DistributedVariable._policy", (_COMPARED, _NOT_COMPARED))
UNIQUE_ID = _internal(f"{_RESOURCE}._unique_id", (_COMPARED, _NOT_COMPARED))
COLLECTIVE_KEY_BASE = _internal(
    "tensorflow:distribute.MirroredStrategy._collective_key_base",
    ("a second strategy of several devices in a process", "refused; the first one works"),
)
MIRRORED = _internal(
    f"{_VALUES}:Mirrored",
    ("sums on several GPUs; reduce_to, broadcast and their like in custom loops", "refused"),
)
INPUT_DEVICES = _internal(
    f"{_MIRRORED}._input_workers_devices",
    ("a distributed dataset with a pipeline for each replica", "refused"),
)
DISTRIBUTED_VARIABLE = _internal(
    f"{_VALUES}:DistributedVariable",
    (
        "int(), float(), bool() and np.array() of a mirrored variable",
        "as in TensorFlow: refused, but bool() is always true",
    ),
)

# Batches on GPUs, and gradients of lookups in eager steps.

_AHEAD = "batches that wait on GPUs for the steps that take them", "they wait on the host"
DEVICE_GENERATOR = _internal(_GENERATOR, _AHEAD)
GENERATOR_BEGIN = _internal(f"{_GENERATOR}._init_func", _AHEAD)
GENERATOR_NEXT = _internal(f"{_GENERATOR}._next_func", _AHEAD)
GENERATOR_END = _internal(f"{_GENERATOR}._finalize_func", _AHEAD)

_LOOKUPS = (
    f"sparse gradients in {_COMPARED}, and of steps with run_eagerly=True",
    f"such steps are refused; {_NOT_COMPARED}",
)
ADD_OP_CALLBACK = _internal(f"{_CALLBACKS}:add_op_callback", _LOOKUPS)
REMOVE_OP_CALLBACK = _internal(f"{_CALLBACKS}:remove_op_callback", _LOOKUPS)

# Several workers.

_JOB = "several workers", "refused"
EAGER_CONTEXT = _internal("tensorflow.python.eager.context:context", _JOB)
CONFIGURE_COLLECTIVES = _internal(f"{_CONTEXT}.configure_collective_ops", _JOB)
CONFIGURE_COORDINATION = _internal(f"{_CONTEXT}.configure_coordination_service", _JOB)
ENABLE_COLLECTIVES = _internal(f"{_CONTEXT}.enable_collective_ops", _JOB)
RUNTIME_CONFIG = _internal(f"{_CONTEXT}.config", _JOB)
START_RUNTIME = _internal(f"{_CONTEXT}.ensure_initialized", _JOB)
WORKERS_EXTENDED = _internal(_WORKERS, _JOB)
CHECKS_HEALTH = _internal(f"{_WORKERS}._enable_check_health", _JOB)
SERVER_STARTED = _internal(f"{_WORKERS}._std_server_started", _JOB)
LOCAL_DEVICES = _internal(f"{_WORKERS}._initialize_local_devices", _JOB)
WORKERS_INITIAL_VALUE = _internal(f"{_WORKERS}._get_variable_creator_initial_value", _JOB)
INITIAL_VALUE = _internal(f"{_MIRRORED}._get_variable_creator_initial_value", _JOB)
CREATE_VARIABLE = _internal(f"{_WORKERS}._create_variable", _JOB)
SYNC_ON_READ_VARIABLE = _internal(f"{_VALUES}:SyncOnReadVariable", _JOB)
READ_SYNC_ON_READ = _internal(f"{_VALUES}:SyncOnReadVariable._get_cross_replica", _JOB)
IN_UPDATE = _internal(f"{_DISTRIBUTE}.values_util:in_replica_update_context", _JOB)

# Profiles.

XPLANE = _internal(
    "tensorflow.tsl.profiler.protobuf.xplane_pb2:XSpace", ("a profile of a run's steps", "refused")
)
