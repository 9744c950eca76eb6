"""The private functions and classes of TensorFlow that kerasdist uses."""

from __future__ import annotations

from kerasdist.core.internals import internal

_CONTEXT = "tensorflow.python.eager.context:Context"
_FUNCTION = "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function"
_AUTOGRAPH = "tensorflow.python.autograph.core"
_CALLBACKS = "tensorflow.python.framework.op_callbacks"
_GENERATOR = "tensorflow.python.data.ops.multi_device_iterator_ops:_PerDeviceGenerator"
_RESOURCE = "tensorflow.python.ops.resource_variable_ops:BaseResourceVariable"
_DISTRIBUTE = "tensorflow.python.distribute"
_VALUES = f"{_DISTRIBUTE}.values"
_MIRRORED = f"{_DISTRIBUTE}.mirrored_strategy:MirroredExtended"
_WORKERS = f"{_DISTRIBUTE}.collective_all_reduce_strategy:CollectiveAllReduceExtended"


# Functions that users have compiled, and functions that AutoGraph converts.

_CONVERTS = "strategy.run, merge_call and update, whose functions AutoGraph may convert"
CONTROL_STATUS = internal("tensorflow:__internal__.autograph.control_status_ctx", _CONVERTS)
CONVERT = internal("tensorflow:__internal__.autograph.tf_convert", f"{_CONVERTS}; decorated steps")

_PASSES_OVER = "tracing a custom loop fast", "AutoGraph also converts the code of kerasdist"
CONVERSION_RULES = internal(f"{_AUTOGRAPH}.config:CONVERSION_RULES", *_PASSES_OVER)
DO_NOT_CONVERT = internal(f"{_AUTOGRAPH}.config:DoNotConvert", *_PASSES_OVER)

_DECORATED = "a train_step, test_step or predict_step decorated with tf.function"
FUNCTION_AUTOGRAPH = internal(f"{_FUNCTION}._autograph", _DECORATED)
CONTROL_STATUS_CONTEXT = internal(f"{_AUTOGRAPH}.ag_ctx:ControlStatusCtx", _DECORATED)
STATUS_ENABLED = internal(f"{_AUTOGRAPH}.ag_ctx:Status.ENABLED", _DECORATED)
FUNCTION_CLONE = internal(
    f"{_FUNCTION}._clone", "strategy.run of a function decorated with tf.function"
)
FUNCTION_JIT_COMPILE = internal(
    f"{_FUNCTION}._jit_compile",
    "the warning that a step decorated with jit_compile=True runs without XLA",
    "no warning",
)
IN_XLA = internal(
    "tensorflow.python.ops.control_flow_util:GraphOrParentsInXlaContext",
    "the error that XLA cannot compile strategy.run",
    "XLA raises its own error in place of kerasdist's",
    otherwise=lambda graph: False,
)

# Scopes and strategies.

_COMPARED = "the comparison of a step with one device"
_NOT_COMPARED = "fit warns that its first step is not compared; compare_with_one_device is refused"
STRATEGY_STACK = internal(
    "tensorflow:Graph._distribution_strategy_stack",
    "an optimizer's step on several devices",
    in_each_fit=True,
)
CREATOR_STACK = internal(
    "tensorflow:Graph._variable_creator_stack",
    f"several workers, and {_COMPARED}",
    f"several workers are refused; {_NOT_COMPARED}",
)
UPDATE_CONTEXT = internal(
    f"{_DISTRIBUTE}.distribute_lib:UpdateContext",
    "an optimizer's step on several GPUs",
    "refused on GPUs",
)
UNIQUE_ID = internal(f"{_RESOURCE}._unique_id", _COMPARED, _NOT_COMPARED)
COLLECTIVE_KEY_BASE = internal(
    "tensorflow:distribute.MirroredStrategy._collective_key_base",
    "a second strategy of several devices in a process",
    "refused; the first one works",
)
MIRRORED = internal(
    f"{_VALUES}:Mirrored",
    "sums on several GPUs, and reduce_to, broadcast_to and similar methods in custom loops",
)
INPUT_DEVICES = internal(
    f"{_MIRRORED}._input_workers_devices", "a distributed dataset with a pipeline for each replica"
)
DISTRIBUTED_VARIABLE = internal(
    f"{_VALUES}:DistributedVariable",
    "int(), float(), bool() and np.array() of a mirrored variable",
    "refused, as in TensorFlow, except bool(), which is always True",
)

# Batches on GPUs, and gradients of lookups in eager steps.

_AHEAD = "copying batches to GPUs before their steps", "they are copied when the steps begin"
DEVICE_GENERATOR = internal(_GENERATOR, *_AHEAD)
GENERATOR_BEGIN = internal(f"{_GENERATOR}._init_func", *_AHEAD)
GENERATOR_NEXT = internal(f"{_GENERATOR}._next_func", *_AHEAD)
GENERATOR_END = internal(f"{_GENERATOR}._finalize_func", *_AHEAD)

_LOOKUPS = (
    f"sparse gradients in {_COMPARED}, and of steps with run_eagerly=True",
    f"such steps are refused; {_NOT_COMPARED}",
)
ADD_OP_CALLBACK = internal(f"{_CALLBACKS}:add_op_callback", *_LOOKUPS)
REMOVE_OP_CALLBACK = internal(f"{_CALLBACKS}:remove_op_callback", *_LOOKUPS)

# Several workers.

JOB = "several workers"
EAGER_CONTEXT = internal("tensorflow.python.eager.context:context", JOB)
CONFIGURE_COLLECTIVES = internal(f"{_CONTEXT}.configure_collective_ops", JOB)
CONFIGURE_COORDINATION = internal(f"{_CONTEXT}.configure_coordination_service", JOB)
ENABLE_COLLECTIVES = internal(f"{_CONTEXT}.enable_collective_ops", JOB)
RUNTIME_CONFIG = internal(f"{_CONTEXT}.config", JOB)
START_RUNTIME = internal(f"{_CONTEXT}.ensure_initialized", JOB)
WORKERS_EXTENDED = internal(_WORKERS, JOB)
CHECKS_HEALTH = internal(f"{_WORKERS}._enable_check_health", JOB)
SERVER_STARTED = internal(f"{_WORKERS}._std_server_started", JOB)
LOCAL_DEVICES = internal(f"{_WORKERS}._initialize_local_devices", JOB)
WORKERS_INITIAL_VALUE = internal(f"{_WORKERS}._get_variable_creator_initial_value", JOB)
INITIAL_VALUE = internal(f"{_MIRRORED}._get_variable_creator_initial_value", JOB)
CREATE_VARIABLE = internal(f"{_WORKERS}._create_variable", JOB)
SYNC_ON_READ_VARIABLE = internal(f"{_VALUES}:SyncOnReadVariable", JOB)
READ_SYNC_ON_READ = internal(f"{_VALUES}:SyncOnReadVariable._get_cross_replica", JOB)
IN_UPDATE = internal(f"{_DISTRIBUTE}.values_util:in_replica_update_context", JOB)

# Profiles.

XPLANE = internal(
    "tensorflow.tsl.profiler.protobuf.xplane_pb2:XSpace", "a profile of a run's steps"
)
