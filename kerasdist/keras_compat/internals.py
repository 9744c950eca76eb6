"""The functions and attributes of Keras that are not public and that kerasdist needs."""

from __future__ import annotations

from kerasdist.core.internals import REFUSED, Internal, internal

_FIT = "training under a strategy"
_LOOK = (
    "the comparison of a first batch with one device",
    "it is made before a user-defined step has built all",
    ("tensorflow",),
)
_WIRING = "comparing models on all workers, and KerasHub's exports"
_NOT_COMPARED = "how layers are wired is not compared, and exports are refused"
_SAVED_PARTS = "files with metrics and regularizers of a strategy's model"
_OWN_NAMES = "files name Keras's module, in place of the public one"
_OUTSIDE_OPTIMIZER = "an optimizer that was built outside of the scope"
_SCALE = "keras.src.losses.loss:scale_loss_for_distribution"
_UNSCALE = "keras.src.losses.loss:unscale_loss_for_distribution"
_BY_REPLICA = ("tensorflow", "torch")  # on JAX, `fit` is one global program


# Models and their steps.

FLATTEN_LAYERS = internal(
    "keras:Layer._flatten_layers", _FIT, "layers are found among the attributes of layers"
)
SYMBOLIC_BUILD = internal(
    "keras:Model._symbolic_build", _FIT, backends=("jax", "torch"), in_each_fit=True
)
BUILD_BEFORE_FIT = internal(
    "keras:Model._symbolic_build",
    "building metrics before the first step",
    "the first step builds them",
    ("tensorflow",),
)
MAYBE_SYMBOLIC_BUILD = internal(
    "keras:Model._maybe_symbolic_build", _FIT, backends=("tensorflow",), in_each_fit=True
)
GET_JAX_STATE = internal("keras:Model._get_jax_state", _FIT, backends=("jax",), in_each_fit=True)
JAX_STATE = internal("keras:Model._jax_state", _FIT, backends=("jax",), in_each_fit=True)
RESULT_OR_LOGS = internal(
    "keras:Model._get_metrics_result_or_logs",
    "metrics that steps do not wait for",
    "each step makes its logs, which is slower",
    ("torch",),
)
USES_TORCH_COMPILE = Internal(
    {"keras:Model._use_torch_compile": "3.16", "keras:Model._should_torch_compile": "3.12 to 3.15"},
    "jit_compile=True on PyTorch",
    REFUSED,
    ("torch",),
)
EPOCH_ITERATOR = internal(
    "keras.src.trainers.epoch_iterator:EpochIterator._get_iterator",
    "the types of a dataset's batches",
    "the dataset is made once more, to look at its types",
    ("tensorflow",),
)
INITIALIZE_DDP = Internal(
    {"keras:Model._initialize_ddp": "3.16"},
    "models outside of the scope in a job's process, which Keras would wrap",
    "such a model is refused in a job",
    ("torch",),
    since="3.16.0.dev0",
)

INITIAL_EPOCH = internal("keras:Model._initial_epoch", "BackupAndRestore")
COMPILED_LOSS = internal("keras:Model._compile_loss", *_LOOK)
COMPILED_METRICS = internal("keras:Model._compile_metrics", *_LOOK)
NODES = internal("keras:Operation._inbound_nodes", _WIRING, _NOT_COMPARED)
HISTORY = internal("keras.src.ops.node:Node._keras_history", _WIRING, _NOT_COMPARED)
INPUT_SIGNATURE = internal(
    "keras.src.export.export_utils:get_input_signature",
    "the share of the peak rate in Telemetry",
    "it is left out",
)
CALLBACK_MODEL = internal(
    "keras:callbacks.Callback._model",
    "callbacks on JAX",
    "reading `callback.model` copies the state",
)
CHOOSE_COMPARISON = internal(
    "keras.callbacks:ModelCheckpoint._set_monitor_op", "BackupAndRestore with save_best_only=True"
)
TREE = internal(
    "keras.src.tree.tree_api:tree_impl",
    "keras.tree on values of replicas",
    "it takes them for leaves",
)
CUSTOM_NAMES = internal(
    "keras.src.saving.object_registration:GLOBAL_CUSTOM_NAMES", _SAVED_PARTS, _OWN_NAMES
)
EXPORTED_NAMES = internal("keras.src.api_export:REGISTERED_OBJS_TO_NAMES", _SAVED_PARTS, _OWN_NAMES)

# Keras's state of each thread, and the names of its entries.

THREAD_STATE = internal(
    "keras.src.backend.common.global_state:GLOBAL_STATE_TRACKER", _FIT, in_each_fit=True
)
STATELESS_SCOPE = internal(
    "keras.src.backend.common.stateless_scope:get_stateless_scope.stateless_scope",
    "scopes of variables",
    "each is found by entering another one, which is slower",
)
WAITING_VARIABLES = internal(
    "keras.src.backend.common.variables:initialize_all_variables.uninitialized_variables",
    "variables that are made in a step",
    backends=("jax", "torch"),
)
CALL_CONTEXT = internal(
    "keras:Layer._get_call_context.current_call_ctx", 'sharding="full"', backends=("torch",)
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
    "sharding=",
    REFUSED,
    ("torch",),
)
SEED_GENERATOR = Internal(
    {
        "keras.src.random.seed_generator:GLOBAL_SEED_GENERATOR": "3.13",
        "keras.src.random.seed_generator:global_seed_generator.global_seed_generator": "3.12",
    },
    "random draws in replicas, and backups of the states of draws",
    REFUSED,
)
RANDOM_SEED = internal(
    "keras.src.utils.rng_utils:GLOBAL_RANDOM_SEED", "equal random numbers on all workers"
)

# Variables.

VALUE = internal("keras:Variable._value", _FIT, in_each_fit=True)
INITIALIZE = internal(
    "keras:Variable._initialize_with_initializer", "sharding=", backends=("jax", "torch")
)
INITIALIZER = internal(
    "keras:Variable._initializer", "variables that are made in a custom loop", backends=("jax",)
)
INITIALIZE_LATER = internal(
    "keras:Variable._deferred_initialize", "variables that are made in a step"
)
REMAKE = internal(
    "keras:Variable._initialize", "metrics and models that were made outside of the scope"
)
AGGREGATION = internal(
    "keras:Variable._aggregation", "metrics and models that were made outside of the scope"
)
SYNCHRONIZATION = internal(
    "keras:Variable._synchronization", "BatchNormalization that was made outside of the scope"
)
DTYPE = internal(
    "keras:Variable._dtype", "the type of weights", "it is taken from the stored value"
)
SHAPE = internal("keras:Variable._shape", "sharding=", backends=("torch",))
AUTOCAST = internal("keras:Variable._maybe_autocast", "mixed precision", backends=("jax", "torch"))
TRACK_VARIABLES = internal("keras:Layer._track_variables", "sharding=", backends=("torch",))
TRACK_VARIABLE = internal("keras:Layer._post_track_variable", "sharding=", backends=("torch",))

# Losses, metrics and normalization.

LOSSES = internal("keras:Layer._losses", "add_loss in a replica")
LOSS_IDS = internal("keras:Layer._loss_ids", "add_loss in `fit`", backends=("jax",))
METRICS = internal("keras:Layer._metrics", _FIT, "metrics are found among the attributes of layers")
METRIC_FUNCTION = internal(
    "keras.metrics:MeanMetricWrapper._fn", "metrics of a function", backends=_BY_REPLICA
)
FUNCTION_ARGUMENTS = internal(
    "keras.losses:MeanSquaredError._fn_kwargs", "losses and metrics that mix examples"
)
CLEAR_LOSSES = internal("keras:Layer._clear_losses", "add_loss in a replica")
LOSS_OF_FUNCTION = internal(
    "keras.src.losses.losses:LossFunctionWrapper.call",
    "losses that mix examples",
    backends=_BY_REPLICA,
)
REDUCE_WEIGHTED_VALUES = internal(
    "keras.src.losses.loss:reduce_weighted_values", _FIT, backends=_BY_REPLICA, in_each_fit=True
)
SCALE_LOSS = internal(_SCALE, "losses of Keras in custom loops", backends=("jax", "torch"))
UNSCALE_LOSS = internal(_UNSCALE, "losses of Keras in custom loops", backends=("jax", "torch"))
# On TensorFlow Keras itself scales losses, also in `fit`.
SCALE_LOSS_IN_FIT = internal(_SCALE, _FIT, backends=("tensorflow",), in_each_fit=True)
UNSCALE_LOSS_IN_FIT = internal(_UNSCALE, _FIT, backends=("tensorflow",), in_each_fit=True)
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
BATCH_MOMENTS = internal(
    "keras.layers:BatchNormalization._moments", "BatchNormalization in replicas"
)
NN_BATCH_NORMALIZATION = Internal(
    {
        "keras.src.backend:ops.nn.batch_normalization": "3.16",
        "keras.src.backend:nn.batch_normalization": "3.12 to 3.15",
    },
    "fused BatchNormalization on GPUs",
    "it takes more time",
    ("torch",),
)

# Files.

SAVE_MODEL = internal("keras.src.saving.saving_lib:save_model", "model.save in a job")
SAVE_WEIGHTS = internal(
    "keras.src.saving.saving_lib:save_weights_only", "model.save_weights in a job"
)
SAVE_HDF5 = internal(
    "keras.src.legacy.saving.legacy_h5_format:save_model_to_hdf5", "HDF5 files in a job"
)

_COMPARED = "a file of weights that does not fit a sharded model is refused before it is loaded"
_AS_IT_IS_LOADED = "Keras refuses it when some weights have changed"
READ_WEIGHT = internal(
    "keras.src.saving.saving_lib:H5IOStore.__getitem__",
    _COMPARED,
    _AS_IT_IS_LOADED,
    backends=("jax", "torch"),
)
WEIGHTS_OF_LAYER = internal(
    "keras.src.saving.saving_lib:H5IOStore._h5_entry_group",
    _COMPARED,
    _AS_IT_IS_LOADED,
    backends=("jax", "torch"),
)

_IN_THE_BACKGROUND = 'kerasdist.callbacks.ModelCheckpoint(save="async")'
_AT_ONCE = "training waits for each file, with a warning"

SAVE_STATE = internal("keras.src.saving.saving_lib:_save_state", _IN_THE_BACKGROUND, _AT_ONCE)
SERIALIZE_MODEL = internal(
    "keras.src.saving.saving_lib:_serialize_model_as_json", _IN_THE_BACKGROUND, _AT_ONCE
)
WEIGHTS_FILE = internal("keras.src.saving.saving_lib:H5IOStore", _IN_THE_BACKGROUND, _AT_ONCE)
ASSETS_FILE = internal("keras.src.saving.saving_lib:DiskIOStore", _IN_THE_BACKGROUND, _AT_ONCE)
FITS_IN_MEMORY = internal(
    "keras.src.saving.saving_lib:is_memory_sufficient", _IN_THE_BACKGROUND, _AT_ONCE
)
COPY_FILE = internal(
    "keras.src.saving.saving_lib:file_utils.copy", f"{_IN_THE_BACKGROUND} on gs:// and the like"
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
    "it is found among the attributes, by what it has",
    ("tensorflow",),
)
VARIABLE_KEY = internal("keras:Optimizer._var_key", _OUTSIDE_OPTIMIZER, backends=("tensorflow",))
NUMBERS_OF_VARIABLES = internal(
    "keras:Optimizer._trainable_variables_indices", _OUTSIDE_OPTIMIZER, backends=("tensorflow",)
)
APPLY_GRADIENTS = internal(
    "keras:Optimizer._backend_apply_gradients", "sharding=", backends=("torch",)
)
UPDATE_AT_ONCE = internal(
    "keras.src.backend.torch.optimizers.torch_parallel_optimizer"
    ":TorchParallelOptimizer._backend_update_step",
    "optimizers that update weights in groups",
    "all weights are updated at once, which takes more memory and time",
    ("torch",),
)
CLIP_GRADIENTS = internal(
    "keras:Optimizer._clip_gradients", "clipping with sharding=", backends=("torch",)
)

# Random numbers, and code that runs in the backward pass.

RANDOM = internal("keras.src.backend:random", "random draws in replicas", backends=_BY_REPLICA)
REMAT = Internal(
    {"keras.src.backend:ops.remat": "3.16", "keras.src.backend:core.remat": "3.12 to 3.15"},
    "gradients in replicas on GPUs, of layers in a keras.RematScope",
    "training several replicas on GPUs is refused",
    ("torch",),
)
CUSTOM_GRADIENT = Internal(
    {
        "keras.src.backend:ops.core.custom_gradient.__call__": "3.16",
        "keras.src.backend:core.custom_gradient.__call__": "3.12 to 3.15",
    },
    "gradients in replicas on GPUs, by keras.ops.custom_gradient",
    "training several replicas on GPUs is refused",
    ("torch",),
)

# Data.

_ADAPTERS = "keras.src.trainers.data_adapters"
_OWN_ROWS = "workers that read their own rows alone of arrays"
_WHOLE_BATCHES = "workers read whole batches of arrays, and take their rows"

GET_DATA_ADAPTER = internal(f"{_ADAPTERS}:get_data_adapter", _FIT, in_each_fit=True)
SPLIT_ARRAYS = internal(
    f"{_ADAPTERS}:array_slicing.train_validation_split", "validation_split under a strategy"
)
ARRAYS = internal(f"{_ADAPTERS}:ArrayDataAdapter._inputs", _OWN_ROWS, _WHOLE_BATCHES)
SLICEABLE = internal(f"{_ADAPTERS}:array_slicing.convert_to_sliceable", _OWN_ROWS, _WHOLE_BATCHES)
EPOCHS_READ = Internal(
    {f"{_ADAPTERS}:ArrayDataAdapter._epoch": "3.16"},
    "BackupAndRestore with data that Keras shuffles",
    f"{REFUSED}; {_WHOLE_BATCHES}",
    since="3.16.0.dev0",
)
GENERATOR = internal(
    f"{_ADAPTERS}:GeneratorDataAdapter.generator", "fit with a distributed dataset of a list"
)
PIPELINE = internal(f"{_ADAPTERS}:TFDatasetAdapter._dataset", "BackupAndRestore with tf.data")
LOADER = internal(
    f"{_ADAPTERS}:TorchDataLoaderAdapter._dataloader",
    "BackupAndRestore with a DataLoader that has a state_dict",
)
GRAIN = internal(f"{_ADAPTERS}:GrainDatasetAdapter._dataset", "BackupAndRestore with Grain")

# TensorFlow's pipelines, which Keras accepts on every backend.

_PLACE = "BackupAndRestore with tf.data"
_OPS = "tensorflow.python.data.ops"

INPUTS_OF_PIPELINE = internal("tensorflow:data.Dataset._inputs", _PLACE)
FUNCTIONS_OF_PIPELINE = internal("tensorflow:data.Dataset._functions", _PLACE)
FUNCTIONS_OF_GRAPH = internal("tensorflow:Graph._functions", _PLACE)
SHUFFLE = internal(f"{_OPS}.shuffle_op:_ShuffleDataset", _PLACE)
SHUFFLE_SEED = internal(f"{_OPS}.shuffle_op:_ShuffleDataset._seed", _PLACE)
SHUFFLE_SECOND_SEED = internal(f"{_OPS}.shuffle_op:_ShuffleDataset._seed2", _PLACE)
CACHE = internal(f"{_OPS}.cache_op:CacheDataset", _PLACE)
VARIANT = internal(f"{_OPS}.dataset_ops:_VariantDataset", _PLACE)
ITERATOR_RESOURCE = internal(f"{_OPS}.iterator_ops:OwnedIterator._iterator_resource", _PLACE)
FLAT_STRUCTURE = internal("tensorflow:data.Dataset._flat_structure", "AutoShardPolicy.FILE")
