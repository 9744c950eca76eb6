"""Which function uses each internal, and what comes of it where the internal is gone.

One that is refused must end in the `VersionError` that names the internal and its feature. One that
goes on runs to its end, and looks at what happens in place of the feature, as its declaration says.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.versions import uses
from tests.versions.uses import Here

Function = Callable[[Here], object]
_ALL = ("tensorflow", "jax", "torch")
_TENSORFLOW, _JAX, _TORCH = (_ALL[number : number + 1] for number in range(3))
_BY_REPLICA = ("tensorflow", "torch")


@dataclass(frozen=True)
class Use:
    """A function, and what comes of it.

    Attributes:
        workers_on: The backends on which two workers run it, in place of one process.
        on: The backends on which it needs the internal.
    """

    function: Function
    is_refused: bool
    workers_on: tuple[str, ...] = ()
    on: tuple[str, ...] = _ALL


def _rows(table: str, is_refused: bool, *rows: Sequence) -> Iterator[tuple[str, Use]]:
    for function, names, *more in rows:
        for name in names.split():
            yield f"{table}.{name}", Use(function, is_refused, *more)


# By the table, and the name in it.
FEATURES: Mapping[str, Use] = dict(
    [
        *_rows(
            "keras",
            True,
            (uses.train, "SYMBOLIC_BUILD MAYBE_SYMBOLIC_BUILD GET_JAX_STATE JAX_STATE"),
            (uses.train, "THREAD_STATE SCALE_LOSS_IN_FIT UNSCALE_LOSS_IN_FIT VALUE"),
            (uses.train, "REDUCE_WEIGHTED_VALUES GET_DATA_ADAPTER"),
            (uses.train, "RANDOM_SEED", _ALL),
            (uses.train_compiled, "USES_TORCH_COMPILE"),
            (
                uses.train_sharded,
                "INITIALIZE TRACK_VARIABLES TRACK_VARIABLE APPLY_GRADIENTS",
                _TORCH,
            ),
            (uses.train_sharded, "CALL_CONTEXT TORCH_DEVICE SHAPE", _TORCH),
            (uses.clip_sharded, "CLIP_GRADIENTS", _TORCH),
            (uses.add_losses, "CLEAR_LOSSES LOSSES LOSS_IDS"),
            (uses.mix_examples, "LOSS_OF_FUNCTION REDUCE_VALUES"),
            (uses.mix_examples, "FUNCTION_ARGUMENTS", (), _BY_REPLICA),
            (uses.reduce_a_loss_in_a_replica, "SCALE_LOSS UNSCALE_LOSS"),
            (uses.mask_with_weights, "APPLY_MASK"),
            (uses.mask, "GET_MASK SET_MASK", (), _BY_REPLICA),
            (uses.train_by_a_map, "LAY_OUT_OUTPUT", _TORCH),
            (uses.normalize, "BATCH_MOMENTS"),
            (uses.normalize_in_a_replica, "NAME_SCOPES"),
            (uses.normalize_by_a_layer_from_outside, "SYNCHRONIZATION"),
            (uses.draw, "RANDOM"),
            (uses.back_up_arrays, "SEED_GENERATOR EPOCHS_READ INITIAL_EPOCH OPTIMIZED_VARIABLES"),
            (uses.mix_precisions, "AUTOCAST", _TORCH),
            (uses.build_in_a_step, "WAITING_VARIABLES"),
            (uses.build_in_a_step, "INITIALIZE_LATER", (), _JAX),
            (uses.measure_in_a_step, "INITIALIZER"),
            (uses.measure_in_the_users_way, "REMAKE AGGREGATION"),
            (uses.measure, "METRIC_FUNCTION"),
            (uses.optimize_from_outside, "VARIABLE_KEY NUMBERS_OF_VARIABLES"),
            (uses.scale_losses, "APPLY_SCALED", (), _BY_REPLICA),
            (uses.save_model, "SAVE_MODEL", _ALL),
            (uses.save_weights, "SAVE_WEIGHTS", _ALL),
            (uses.save_hdf5, "SAVE_HDF5", _ALL),
            (uses.save_behind_on_other_storage, "COPY_FILE"),
            (uses.restore_the_best, "CHOOSE_COMPARISON"),
            (uses.split, "SPLIT_ARRAYS"),
            (uses.read_a_list, "GENERATOR"),
            (uses.back_up_a_pipeline, "PIPELINE INPUTS_OF_PIPELINE FUNCTIONS_OF_PIPELINE"),
            (uses.back_up_a_pipeline, "FUNCTIONS_OF_GRAPH SHUFFLE SHUFFLE_SEED"),
            (uses.back_up_a_pipeline, "SHUFFLE_SECOND_SEED CACHE VARIANT ITERATOR_RESOURCE"),
            (uses.back_up_a_loader, "LOADER"),
            (uses.back_up_grain, "GRAIN"),
            (uses.share_files, "FLAT_STRUCTURE", _ALL),
        ),
        *_rows(
            "keras",
            False,
            (uses.train_equally, "FLATTEN_LAYERS METRICS BUILD_BEFORE_FIT EPOCH_ITERATOR DTYPE"),
            (uses.train_equally, "RESULT_OR_LOGS UPDATE_AT_ONCE"),
            (uses.clip_sharded, "READ_WEIGHT WEIGHTS_OF_LAYER", _TORCH, ("jax", "torch")),
            (uses.train, "ARRAYS SLICEABLE NODES HISTORY", _ALL),
            (uses.train_outside, "INITIALIZE_DDP"),
            (uses.normalize, "NN_BATCH_NORMALIZATION"),
            (uses.remat, "REMAT"),
            (uses.give_a_gradient, "CUSTOM_GRADIENT"),
            (uses.compare, "COMPILED_LOSS COMPILED_METRICS STRATEGY_OF_OPTIMIZER"),
            (uses.watch, "INPUT_SIGNATURE"),
            (uses.back_up_arrays, "CALLBACK_MODEL"),
            (uses.flatten_values_of_replicas, "TREE"),
            (uses.save_with_metrics, "CUSTOM_NAMES EXPORTED_NAMES"),
            (uses.save_behind, "SAVE_STATE SERIALIZE_MODEL WEIGHTS_FILE ASSETS_FILE"),
            (uses.save_behind, "FITS_IN_MEMORY"),
        ),
        *_rows(
            "tensorflow",
            True,
            (uses.train, "STRATEGY_STACK"),
            (uses.train, "CREATOR_STACK EAGER_CONTEXT CONFIGURE_COLLECTIVES", _TENSORFLOW),
            (uses.train, "CONFIGURE_COORDINATION ENABLE_COLLECTIVES RUNTIME_CONFIG", _TENSORFLOW),
            (
                uses.train,
                "START_RUNTIME WORKERS_EXTENDED CHECKS_HEALTH SERVER_STARTED",
                _TENSORFLOW,
            ),
            (uses.train, "LOCAL_DEVICES WORKERS_INITIAL_VALUE INITIAL_VALUE", _TENSORFLOW),
            (uses.train, "CREATE_VARIABLE SYNC_ON_READ_VARIABLE READ_SYNC_ON_READ", _TENSORFLOW),
            (uses.train, "IN_UPDATE", _TENSORFLOW),
            (uses.run, "CONTROL_STATUS CONVERT"),
            (uses.run_a_function, "FUNCTION_CLONE"),
            (uses.train_by_a_function, "FUNCTION_AUTOGRAPH"),
            (uses.train_by_a_function, "CONTROL_STATUS_CONTEXT STATUS_ENABLED"),
            (uses.compare, "UNIQUE_ID"),
            (uses.make_a_second_strategy, "COLLECTIVE_KEY_BASE"),
            (uses.broadcast, "MIRRORED"),
            (uses.read_by_pipelines, "INPUT_DEVICES"),
            (uses.look_up_eagerly, "ADD_OP_CALLBACK REMOVE_OP_CALLBACK"),
            (uses.profile, "XPLANE"),
        ),
        *_rows(
            "tensorflow",
            False,
            (uses.run_in_a_function, "CONVERSION_RULES DO_NOT_CONVERT"),
            (uses.train_by_a_function_in_xla, "FUNCTION_JIT_COMPILE"),
            (uses.run_in_xla, "IN_XLA"),
            (uses.convert_variables, "DISTRIBUTED_VARIABLE"),
            (uses.train_equally, "DEVICE_GENERATOR GENERATOR_BEGIN GENERATOR_NEXT GENERATOR_END"),
            (uses.train_equally, "UPDATE_CONTEXT"),  # no GPUs are here
        ),
        *_rows("jax", True, (uses.describe_a_tpu, "GET_TOPOLOGY")),
        *_rows("jax", False, (uses.train_equally, "CREATE_DEVICE_MESH")),
        *_rows(
            "torch",
            True,
            (uses.scale_losses, "CALL_AFTER_BACKWARD"),
            (uses.change_buffers, "COUNT_OF_CHANGES"),
            (uses.compare, "DISPATCH_MODE"),
            (uses.train_by_a_map, "OPERATION_SCHEMA", _TORCH),
        ),
        *_rows(
            "torch",
            False,
            (uses.train_equally, "MULTIPLY_EACH ADD_TO_EACH COPY_TO_EACH COMPILER_ERROR"),
            (uses.train_in_modes, "FUNCTION_MODES DISPATCH_MODES SAVED_TENSORS_HOOKS"),
            (uses.normalize, "ARE_TRANSFORMS_ACTIVE"),
        ),
    ]
)
