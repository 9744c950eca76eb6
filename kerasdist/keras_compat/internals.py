"""What kerasdist holds on to in Keras that is not public: each internal once, by what needs it."""

from __future__ import annotations

from kerasdist.core.internals import EVERY_VERSION, Internal

_REFUSED = "refused"
_FIT = "training under a strategy"
_BY_REPLICA = ("tensorflow", "torch")  # on JAX, `fit` is one global program


def _internal(
    path: str,
    feature: str,
    without: str = _REFUSED,
    backends: tuple[str, ...] = (),
    *,
    in_each_fit: bool = False,
) -> Internal:
    """Returns an internal that has one spelling in all supported versions."""
    return Internal({path: EVERY_VERSION}, feature, without, backends, in_each_fit)


# Models and their steps.

FLATTEN_LAYERS = _internal(
    "keras:Layer._flatten_layers", _FIT, "layers are found among the attributes of layers"
)
SYMBOLIC_BUILD = _internal("keras:Model._symbolic_build", _FIT, in_each_fit=True)
MAYBE_SYMBOLIC_BUILD = _internal(
    "keras:Model._maybe_symbolic_build", _FIT, backends=("tensorflow",), in_each_fit=True
)
GET_JAX_STATE = _internal("keras:Model._get_jax_state", _FIT, backends=("jax",), in_each_fit=True)
PURGE_VARIABLES = _internal(
    "keras:Model._purge_model_variables", _FIT, backends=("jax",), in_each_fit=True
)
JAX_STATE = _internal("keras:Model._jax_state", _FIT, backends=("jax",), in_each_fit=True)
JAX_STATE_SYNCED = _internal(
    "keras:Model._jax_state_synced", _FIT, backends=("jax",), in_each_fit=True
)
EPOCH_ITERATOR = _internal(
    "keras.src.backend.tensorflow.trainer:TFEpochIterator._get_iterator",
    _FIT,
    backends=("tensorflow",),
    in_each_fit=True,
)
RESULT_OR_LOGS = _internal(
    "keras:Model._get_metrics_result_or_logs",
    "metrics that steps do not wait for",
    "each step makes its logs, which is slower",
    ("torch",),
)
USES_TORCH_COMPILE = Internal(
    {"keras:Model._use_torch_compile": "3.16", "keras:Model._should_torch_compile": "3.12 to 3.15"},
    "jit_compile=True on PyTorch",
    _REFUSED,
    ("torch",),
)
INITIALIZE_DDP = Internal(
    {"keras:Model._initialize_ddp": "3.16"},
    "models outside of the scope in a job's process, which Keras would wrap",
    "such a model is refused in a job",
    ("torch",),
    since="3.16.0.dev0",
)

# Variables.

VALUE = _internal("keras:Variable._value", _FIT, in_each_fit=True)
INITIALIZE = _internal(
    "keras:Variable._initialize_with_initializer", "sharding=", backends=("jax", "torch")
)
TRACK_VARIABLES = _internal("keras:Layer._track_variables", "sharding=", backends=("torch",))

# Losses and normalization.

CLEAR_LOSSES = _internal("keras:Layer._clear_losses", "add_loss in a replica")
LOSS_OF_FUNCTION = _internal(
    "keras.src.losses.losses:LossFunctionWrapper.call", "losses that mix examples"
)
REDUCE_WEIGHTED_VALUES = _internal(
    "keras.src.losses.loss:reduce_weighted_values", _FIT, backends=_BY_REPLICA, in_each_fit=True
)
SCALE_LOSS = _internal(
    "keras.src.losses.loss:scale_loss_for_distribution", "losses of Keras in custom loops"
)
UNSCALE_LOSS = _internal(
    "keras.src.losses.loss:unscale_loss_for_distribution", "losses of Keras in custom loops"
)
APPLY_MASK = _internal(
    "keras.src.losses.loss:apply_mask", "masks with sample weights", backends=_BY_REPLICA
)
REDUCE_VALUES = _internal(
    "keras.src.losses.loss:reduce_values", "losses of Keras that mix the examples of a batch"
)
FUNCTION_ARGUMENTS = _internal(
    "keras:losses.MeanSquaredError._fn_kwargs",
    "comparing the options of losses and metrics on workers",
    "they are not compared",
)
STATELESS_SCOPE = _internal("keras.src.backend:get_stateless_scope", _FIT, in_each_fit=True)
GET_MASK = _internal("keras.src.backend.common:masking.get_keras_mask", "masks of layers")
SET_MASK = _internal("keras.src.backend.common:masking.set_keras_mask", "masks of layers")
BATCH_MOMENTS = _internal(
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

SAVE_MODEL = _internal("keras.src.saving.saving_lib:save_model", "model.save in a job")
SAVE_WEIGHTS = _internal(
    "keras.src.saving.saving_lib:save_weights_only", "model.save_weights in a job"
)
SAVE_HDF5 = _internal(
    "keras.src.legacy.saving.legacy_h5_format:save_model_to_hdf5", "HDF5 files in a job"
)

_IN_THE_BACKGROUND = 'kerasdist.callbacks.ModelCheckpoint(save="async")'
_AT_ONCE = "training waits for each file, with a warning"

SAVE_STATE = _internal("keras.src.saving.saving_lib:_save_state", _IN_THE_BACKGROUND, _AT_ONCE)
SERIALIZE_MODEL = _internal(
    "keras.src.saving.saving_lib:_serialize_model_as_json", _IN_THE_BACKGROUND, _AT_ONCE
)
WEIGHTS_FILE = _internal("keras.src.saving.saving_lib:H5IOStore", _IN_THE_BACKGROUND, _AT_ONCE)
ASSETS_FILE = _internal("keras.src.saving.saving_lib:DiskIOStore", _IN_THE_BACKGROUND, _AT_ONCE)
FITS_IN_MEMORY = _internal(
    "keras.src.saving.saving_lib:is_memory_sufficient", _IN_THE_BACKGROUND, _AT_ONCE
)
COPY_FILE = _internal(
    "keras.src.saving.saving_lib:file_utils.copy", f"{_IN_THE_BACKGROUND} on gs:// and the like"
)

# Optimizers.

APPLY_GRADIENTS = _internal(
    "keras:Optimizer._backend_apply_gradients", "sharding=", backends=("torch",)
)
CLIP_GRADIENTS = _internal(
    "keras:Optimizer._clip_gradients", "clipping with sharding=", backends=("torch",)
)

# Random numbers, and code that goes backward.

RANDOM = _internal("keras.src.backend:random", "random draws in replicas")
REMAT = Internal(
    {"keras.src.backend:ops.core.remat": "3.16", "keras.src.backend:core.remat": "3.12 to 3.15"},
    "keras.remat and RematScope in replicas",
    _REFUSED,
    ("torch",),
)
CUSTOM_GRADIENT = Internal(
    {
        "keras.src.backend:ops.core.custom_gradient.__call__": "3.16",
        "keras.src.backend:core.custom_gradient.__call__": "3.12 to 3.15",
    },
    "keras.ops.custom_gradient in replicas",
    _REFUSED,
    ("torch",),
)

# Data.

_ADAPTERS = "keras.src.trainers.data_adapters"
_OWN_ROWS = "workers that read their own rows alone of arrays"
_WHOLE_BATCHES = "workers read whole batches of arrays, and take their rows"

GET_DATA_ADAPTER = _internal(f"{_ADAPTERS}:get_data_adapter", _FIT, in_each_fit=True)
SPLIT_ARRAYS = _internal(
    f"{_ADAPTERS}:array_slicing.train_validation_split", "validation_split under a strategy"
)
ARRAYS = _internal(f"{_ADAPTERS}:ArrayDataAdapter._inputs", _OWN_ROWS, _WHOLE_BATCHES)
SLICEABLE = _internal(f"{_ADAPTERS}:array_slicing.convert_to_sliceable", _OWN_ROWS, _WHOLE_BATCHES)
EPOCHS_READ = Internal(
    {f"{_ADAPTERS}:ArrayDataAdapter._epoch": "3.16"},
    "BackupAndRestore with data that Keras shuffles",
    f"{_REFUSED}; {_WHOLE_BATCHES}",
    since="3.16.0.dev0",
)
GENERATOR = _internal(
    f"{_ADAPTERS}:GeneratorDataAdapter.generator", "fit with a distributed dataset of a list"
)
PIPELINE = _internal(f"{_ADAPTERS}:TFDatasetAdapter._dataset", "BackupAndRestore with tf.data")
LOADER = _internal(
    f"{_ADAPTERS}:TorchDataLoaderAdapter._dataloader",
    "BackupAndRestore with a DataLoader that has a state_dict",
)
GRAIN = _internal(f"{_ADAPTERS}:GrainDatasetAdapter._dataset", "BackupAndRestore with Grain")

# TensorFlow's pipelines, which Keras takes on every backend.

_PLACE = "BackupAndRestore with tf.data"
_OPS = "tensorflow.python.data.ops"

INPUTS_OF_PIPELINE = _internal("tensorflow:data.Dataset._inputs", _PLACE)
FUNCTIONS_OF_PIPELINE = _internal("tensorflow:data.Dataset._functions", _PLACE)
FUNCTIONS_OF_GRAPH = _internal("tensorflow:Graph._functions", _PLACE)
SHUFFLE = _internal(f"{_OPS}.shuffle_op:_ShuffleDataset", _PLACE)
SHUFFLE_SEED = _internal(f"{_OPS}.shuffle_op:_ShuffleDataset._seed", _PLACE)
SHUFFLE_SECOND_SEED = _internal(f"{_OPS}.shuffle_op:_ShuffleDataset._seed2", _PLACE)
CACHE = _internal(f"{_OPS}.cache_op:CacheDataset", _PLACE)
VARIANT = _internal(f"{_OPS}.dataset_ops:_VariantDataset", _PLACE)
ITERATOR_RESOURCE = _internal(f"{_OPS}.iterator_ops:OwnedIterator._iterator_resource", _PLACE)
FLAT_STRUCTURE = _internal("tensorflow:data.Dataset._flat_structure", "AutoShardPolicy.FILE")
