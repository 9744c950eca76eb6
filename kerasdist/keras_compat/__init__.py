"""The only place that touches Keras's private parts.

`patches` is where kerasdist steps into Keras; the others are the few private functions it calls.
``tests/unit/test_keras_compat.py`` fails when Keras moves what is patched; for the rest there are
cases in the suites, which run over the oldest Keras, too.
"""

from __future__ import annotations

from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.losses.loss import apply_mask, reduce_values
from keras.src.trainers.compile_utils import CompileMetrics
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter

from kerasdist.keras_compat.array_rows import (
    has_sparse,
    is_array_adapter,
    jax_rows,
    tensorflow_rows,
    torch_rows,
)
from kerasdist.keras_compat.data import (
    PyDataset,
    auto_shard_policy,
    batches,
    copied,
    epochs_read,
    equal_batches,
    every_nth_file,
    get_data_adapter,
    has_threads,
    is_array,
    is_dataset,
    is_native_dataset,
    is_tf_dataset,
    is_torch_dataloader,
    leave_accelerators,
    own_batches,
    reads_aside,
    set_epochs_read,
    shuffles_without_seed,
    spec_of_rows,
    train_validation_split,
    yields_new_arrays,
)
from kerasdist.keras_compat.models import (
    BATCH_EVENTS,
    DIVIDES_ACTIVITY_PENALTY,
    KNOWS_SYNCHRONIZED,
    TRAIN_BATCH_EVENTS,
    LayoutMap,
    attached_metrics,
    backend_name,
    clear_losses_on,
    compiled_losses,
    compiled_metrics,
    copy_thread_state,
    drop_compiled,
    flat_layers,
    given_metrics,
    has_built_layers,
    initial_epoch,
    is_builtin,
    is_complete,
    is_default_name,
    is_in_layer,
    is_of_optimizer,
    is_orbax_checkpoint,
    is_symbolic,
    is_wired,
    loss_ids_on,
    losses_on,
    metrics_here,
    mixes_examples,
    model_of,
    numbers_of,
    ops,
    overrides,
    parts_of,
    paste_thread_state,
    register_tree_node,
    seed_states,
    serialize_as,
    set_initial_epoch,
    shapes_of_example,
    skip_batches,
    whole_batch,
    wiring,
)
from kerasdist.keras_compat.optimizers import (
    ELEMENTWISE,
    LossScaleOptimizer,
    applies_directly,
    apply_combined_gradients,
    apply_scaled_gradients,
    copy_of_optimizer,
    index_variables,
    is_elementwise,
    move_optimizer,
    optimized_variables,
    referenced_variables,
    updating,
)
from kerasdist.keras_compat.patches import HAS_DDP, install
from kerasdist.keras_compat.pipelines import (
    begun_at,
    facts_of,
    follow_source,
    loads_state,
    place_of,
    source_of,
)
from kerasdist.keras_compat.settings import (
    global_seed,
    global_seed_generator,
    is_seeded,
    set_global_seed_generator,
    set_random_seed,
    settings,
)
from kerasdist.keras_compat.snapshots import Memory, Snapshot
from kerasdist.keras_compat.variables import (
    autocast,
    change_aggregation,
    held_value,
    in_trial,
    initialize_waiting_variable,
    initialize_waiting_variables,
    multiply_initializer,
    outside_stateless_scopes,
    reinitialize,
    set_replication,
    stateless_scope,
    store_shape,
    store_value,
    store_values,
    stored_dtype,
    stored_value,
    stored_values,
    trial,
    value_reader,
)
