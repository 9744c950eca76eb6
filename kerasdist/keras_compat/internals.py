"""The functions and attributes of Keras that are not public and that kerasdist needs."""

from __future__ import annotations

from functools import partial

from kerasdist.core.internals import REFUSED, Internal, internal

_FIT = "training under a strategy"
_OUTSIDE = "metrics and models that were made outside of the scope"
_SCALE = "keras.src.losses.loss:scale_loss_for_distribution"
_UNSCALE = "keras.src.losses.loss:unscale_loss_for_distribution"
_TENSORFLOW, _TORCH, _COMPILED = ("tensorflow",), ("torch",), ("jax", "torch")
_BY_REPLICA = ("tensorflow", "torch")  # not JAX, on which `fit` is one global program

# Features that need several internals.
SHARDING, SAVE_ASYNC = "sharding=", 'kerasdist.callbacks.ModelCheckpoint(save="async")'
_each_fit = partial(internal, feature=_FIT, in_each_fit=True)
_sharding = partial(internal, feature=SHARDING, backends=_TORCH)
_first_batch = partial(
    internal,
    feature="the comparison of a first batch with one device",
    without="the comparison runs before a user-defined step has built the loss and the metrics",
    backends=_TENSORFLOW,
)
_wiring = partial(
    internal,
    feature="comparing models on all workers, and KerasHub's exports",
    without="the connections of layers are not compared, and exports are refused",
)
_outside_optimizer = partial(
    internal, feature="an optimizer that was built outside of the scope", backends=_TENSORFLOW
)
_files = partial(
    internal,
    feature="a file of weights that does not fit a sharded model is refused before it is loaded",
    without="Keras refuses such a file only when some weights have already changed",
    backends=_COMPILED,
)
_background = partial(
    internal, feature=SAVE_ASYNC, without="training waits for each file, with a warning"
)
_own_rows = partial(
    internal,
    feature="workers that read only their own rows of arrays",
    without="workers read whole batches of arrays, and keep their own rows",
)
_pipeline = partial(internal, feature="BackupAndRestore with tf.data")

# Models and their steps.

FLATTEN_LAYERS = internal(
    "keras:Layer._flatten_layers", _FIT, "layers are found among the attributes of layers"
)
SYMBOLIC_BUILD = _each_fit("keras:Model._symbolic_build", backends=_COMPILED)
BUILD_BEFORE_FIT = internal(
    "keras:Model._symbolic_build",
    "building metrics before the first step",
    "the first step builds them",
    _TENSORFLOW,
)
MAYBE_SYMBOLIC_BUILD = _each_fit("keras:Model._maybe_symbolic_build", backends=_TENSORFLOW)
GET_JAX_STATE = _each_fit("keras:Model._get_jax_state", backends=("jax",))
JAX_STATE = _each_fit("keras:Model._jax_state", backends=("jax",))
RESULT_OR_LOGS = internal(
    "keras:Model._get_metrics_result_or_logs",
    "computing the logs only at the end of an epoch if no callback reads them",
    "each step computes its logs, which is slower",
    _TORCH,
)
USES_TORCH_COMPILE = Internal(
    {"keras:Model._use_torch_compile": "3.16", "keras:Model._should_torch_compile": "3.12 to 3.15"},
    "jit_compile=True on PyTorch",
    backends=_TORCH,
)
EPOCH_ITERATOR = internal(
    "keras.src.trainers.epoch_iterator:EpochIterator._get_iterator",
    "reading the types of a dataset's batches",
    "the dataset is created a second time to read the types",
    _TENSORFLOW,
)
INITIALIZE_DDP = Internal(
    {"keras:Model._initialize_ddp": "3.16"},
    "models made outside of the scope in a job, which Keras would wrap in DistributedDataParallel",
    "such a model is refused in a job",
    _TORCH,
)

# The attribute with the epoch at which `fit` begins. If it is None, the argument `initial_epoch`
# decides.
INITIAL_EPOCH = internal("keras:Model._initial_epoch", "BackupAndRestore")
COMPILED_LOSS = _first_batch("keras:Model._compile_loss")
COMPILED_METRICS = _first_batch("keras:Model._compile_metrics")
NODES = _wiring("keras:Operation._inbound_nodes")
HISTORY = _wiring("keras.src.ops.node:Node._keras_history")
INPUT_SIGNATURE = internal(
    "keras.src.export.export_utils:get_input_signature", "the `mfu` of Telemetry", "`mfu` is null"
)
CALLBACK_MODEL = internal(
    "keras:callbacks.Callback._model",
    "reading a callback's model on JAX without a copy of the model's state",
    "reading `callback.model` copies the model's state",
)
CHOOSE_COMPARISON = internal(
    "keras.callbacks:ModelCheckpoint._set_monitor_op", "BackupAndRestore with save_best_only=True"
)
TREE = internal(
    "keras.src.tree.tree_api:tree_impl",
    "keras.tree on distributed values",
    "keras.tree treats a distributed value as a leaf",
)

# Keras's state of each thread, and the names of its entries.

THREAD_STATE = _each_fit("keras.src.backend.common.global_state:GLOBAL_STATE_TRACKER")
WAITING_VARIABLES = internal(
    "keras.src.backend.common.variables:initialize_all_variables.uninitialized_variables",
    "variables that are made in a step",
    backends=_COMPILED,
)
CALL_CONTEXT = _sharding(
    "keras:Layer._get_call_context.current_call_ctx", feature='sharding="full"'
)
NAME_SCOPES = internal(
    "keras.src.backend.common.name_scope:current_path.name_scope_stack",
    "BatchNormalization in replicas, and sharding=",
)
TORCH_DEVICE = Internal(
    {
        "keras.src.backend.torch.ops.core:get_device.torch_device": "3.16",
        "keras.src.backend.torch.core:get_device.torch_device": "3.12 to 3.15",
    },
    SHARDING,
    backends=_TORCH,
)
SEED_GENERATOR = Internal(
    {
        "keras.src.random.seed_generator:GLOBAL_SEED_GENERATOR": "3.13",
        "keras.src.random.seed_generator:global_seed_generator.global_seed_generator": "3.12",
    },
    "random numbers in replicas, and the random state in backups",
)
RANDOM_SEED = internal(
    "keras.src.utils.rng_utils:GLOBAL_RANDOM_SEED", "equal random numbers on all workers"
)

# Variables.

VALUE = _each_fit("keras:Variable._value")
INITIALIZE = _sharding("keras:Variable._initialize_with_initializer", backends=_COMPILED)
INITIALIZER = internal(
    "keras:Variable._initializer", "variables that are made in a custom loop", backends=("jax",)
)
INITIALIZE_LATER = internal(
    "keras:Variable._deferred_initialize", "variables that are made in a step"
)
REMAKE = internal("keras:Variable._initialize", _OUTSIDE)
AGGREGATION = internal("keras:Variable._aggregation", _OUTSIDE)
SYNCHRONIZATION = internal(
    "keras:Variable._synchronization", "BatchNormalization that was made outside of the scope"
)
DTYPE = internal(
    "keras:Variable._dtype", "the type in which a variable is stored", "its value says the type"
)
SHAPE = _sharding("keras:Variable._shape")
AUTOCAST = internal("keras:Variable._maybe_autocast", "mixed precision", backends=_COMPILED)
TRACK_VARIABLES = _sharding("keras:Layer._track_variables")
TRACK_VARIABLE = _sharding("keras:Layer._post_track_variable")

# Losses, metrics and normalization.

LOSSES = internal("keras:Layer._losses", "add_loss in a replica")
LOSS_IDS = internal("keras:Layer._loss_ids", "add_loss in `fit`", backends=("jax",))
METRICS = internal("keras:Layer._metrics", _FIT, "metrics are found among the attributes of layers")
METRIC_FUNCTION = internal(
    "keras.metrics:MeanMetricWrapper._fn", "metrics that wrap a function", backends=_BY_REPLICA
)
FUNCTION_ARGUMENTS = internal(
    "keras.losses:MeanSquaredError._fn_kwargs",
    "losses and metrics of Keras that mix the examples of a batch",
)
CLEAR_LOSSES = internal("keras:Layer._clear_losses", "add_loss in a replica")
REDUCE_WEIGHTED_VALUES = _each_fit(
    "keras.src.losses.loss:reduce_weighted_values", backends=_BY_REPLICA
)
SCALE_LOSS = internal(_SCALE, "losses of Keras in custom loops", backends=_COMPILED)
UNSCALE_LOSS = internal(_UNSCALE, "losses of Keras in custom loops", backends=_COMPILED)
# On TensorFlow Keras itself scales losses, also in `fit`.
SCALE_LOSS_IN_FIT = _each_fit(_SCALE, backends=_TENSORFLOW)
UNSCALE_LOSS_IN_FIT = _each_fit(_UNSCALE, backends=_TENSORFLOW)
APPLY_MASK = internal(
    "keras.src.losses.loss:apply_mask", "masks with sample weights", backends=_BY_REPLICA
)
REDUCE_VALUES = internal(
    "keras.src.losses.loss:reduce_values",
    "losses of Keras that mix the examples of a batch",
    backends=_BY_REPLICA,
)
GET_MASK = internal("keras.src.backend.common:masking.get_keras_mask", "masks of layers")
SET_MASK = internal("keras.src.backend.common:masking.set_keras_mask", "masks of layers")
LAY_OUT_OUTPUT = internal(
    "keras.src.distribution.distribution_lib:distribute_tensor",
    "layouts of layers' outputs in a LayoutMap",
    backends=("jax",),
)
BATCH_MOMENTS = internal(
    "keras.layers:BatchNormalization._moments", "BatchNormalization in replicas"
)
NN_BATCH_NORMALIZATION = Internal(
    {
        "keras.src.backend:ops.nn.batch_normalization": "3.16",
        "keras.src.backend:nn.batch_normalization": "3.12 to 3.15",
    },
    "fused BatchNormalization on GPUs",
    "normalization is slower",
    _TORCH,
)

# Files.

SAVE_MODEL = internal("keras.src.saving.saving_lib:save_model", "model.save in a job")
SAVE_WEIGHTS = internal(
    "keras.src.saving.saving_lib:save_weights_only", "model.save_weights in a job"
)
SAVE_HDF5 = internal(
    "keras.src.legacy.saving.legacy_h5_format:save_model_to_hdf5", "HDF5 files in a job"
)

READ_WEIGHT = _files("keras.src.saving.saving_lib:H5IOStore.__getitem__")
WEIGHTS_OF_LAYER = _files("keras.src.saving.saving_lib:H5IOStore._h5_entry_group")

SAVE_STATE = _background("keras.src.saving.saving_lib:_save_state")
SERIALIZE_MODEL = _background("keras.src.saving.saving_lib:_serialize_model_as_json")
WEIGHTS_FILE = _background("keras.src.saving.saving_lib:H5IOStore")
ASSETS_FILE = _background("keras.src.saving.saving_lib:DiskIOStore")
FITS_IN_MEMORY = _background("keras.src.saving.saving_lib:is_memory_sufficient")
COPY_FILE = internal(
    "keras.src.saving.saving_lib:file_utils.copy", f"{SAVE_ASYNC} on gs:// and the like"
)

# Optimizers.

OPTIMIZED_VARIABLES = internal(
    "keras:Optimizer._trainable_variables",
    "BackupAndRestore, sharding=, and optimizer.apply without variables",
)
APPLY_SCALED = internal(
    "keras.optimizers:LossScaleOptimizer._common_apply", "LossScaleOptimizer in replicas"
)
STRATEGY_OF_OPTIMIZER = internal(
    "keras:Optimizer._distribution_strategy",
    _FIT,
    "kerasdist searches the optimizer's attributes for the strategy",
    _TENSORFLOW,
)
VARIABLE_KEY = _outside_optimizer("keras:Optimizer._var_key")
NUMBERS_OF_VARIABLES = _outside_optimizer("keras:Optimizer._trainable_variables_indices")
APPLY_GRADIENTS = _sharding("keras:Optimizer._backend_apply_gradients")
UPDATE_AT_ONCE = internal(
    "keras.src.backend.torch.optimizers.torch_parallel_optimizer"
    ":TorchParallelOptimizer._backend_update_step",
    "optimizers that update weights in groups",
    "all weights are updated at once, which takes more memory and time",
    _TORCH,
)
CLIP_GRADIENTS = _sharding("keras:Optimizer._clip_gradients", feature="clipping with sharding=")

# Random numbers, and code that runs in the backward pass.

RANDOM = internal("keras.src.backend:random", "random numbers in replicas", backends=_BY_REPLICA)
REMAT = Internal(
    {"keras.src.backend:ops.remat": "3.16", "keras.src.backend:core.remat": "3.12 to 3.15"},
    "gradients in replicas on GPUs, of layers in a keras.RematScope",
    "training several replicas on GPUs is refused",
    _TORCH,
)
CUSTOM_GRADIENT = Internal(
    {
        "keras.src.backend:ops.core.custom_gradient.__call__": "3.16",
        "keras.src.backend:core.custom_gradient.__call__": "3.12 to 3.15",
    },
    "gradients in replicas on GPUs, by keras.ops.custom_gradient",
    "training several replicas on GPUs is refused",
    _TORCH,
)

# Data.

_ADAPTERS = "keras.src.trainers.data_adapters"

GET_DATA_ADAPTER = _each_fit(f"{_ADAPTERS}:get_data_adapter")
SPLIT_ARRAYS = internal(
    f"{_ADAPTERS}:array_slicing.train_validation_split", "validation_split under a strategy"
)
ARRAYS = _own_rows(f"{_ADAPTERS}:ArrayDataAdapter._inputs")
SLICEABLE = _own_rows(f"{_ADAPTERS}:array_slicing.convert_to_sliceable")
EPOCHS_READ = Internal(
    {f"{_ADAPTERS}:ArrayDataAdapter._epoch": "3.16"},
    "BackupAndRestore with data that Keras shuffles",
    f"{REFUSED}; {_own_rows.keywords['without']}",
)
GENERATOR = internal(
    f"{_ADAPTERS}:GeneratorDataAdapter.generator", "fit with a distributed dataset of a list"
)
PIPELINE = _pipeline(f"{_ADAPTERS}:TFDatasetAdapter._dataset")
LOADER = internal(
    f"{_ADAPTERS}:TorchDataLoaderAdapter._dataloader",
    "BackupAndRestore with a DataLoader that has a state_dict",
)
GRAIN = internal(f"{_ADAPTERS}:GrainDatasetAdapter._dataset", "BackupAndRestore with Grain")

# TensorFlow's pipelines, which Keras accepts on every backend.

_OPS = "tensorflow.python.data.ops"

INPUTS_OF_PIPELINE = _pipeline("tensorflow:data.Dataset._inputs")
FUNCTIONS_OF_PIPELINE = _pipeline("tensorflow:data.Dataset._functions")
FUNCTIONS_OF_GRAPH = _pipeline("tensorflow:Graph._functions")
SHUFFLE = _pipeline(f"{_OPS}.shuffle_op:_ShuffleDataset")
SHUFFLE_SEED = _pipeline(f"{_OPS}.shuffle_op:_ShuffleDataset._seed")
SHUFFLE_SECOND_SEED = _pipeline(f"{_OPS}.shuffle_op:_ShuffleDataset._seed2")
CACHE = _pipeline(f"{_OPS}.cache_op:CacheDataset")
VARIANT = _pipeline(f"{_OPS}.dataset_ops:_VariantDataset")
ITERATOR_RESOURCE = _pipeline(f"{_OPS}.iterator_ops:OwnedIterator._iterator_resource")
FLAT_STRUCTURE = internal("tensorflow:data.Dataset._flat_structure", "AutoShardPolicy.FILE")
