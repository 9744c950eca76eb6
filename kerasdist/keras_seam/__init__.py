"""The only place that touches Keras's private parts.

`hooks` is where kerasdist steps into Keras; the other files are the few private functions it calls.
Each is watched by a test in ``tests/unit/test_keras_seam.py`` that fails when Keras moves it.
"""

from __future__ import annotations

from keras.src.layers.layer import Layer
from keras.src.losses.loss import apply_mask
from keras.src.models.model import Trainer as BackendTrainer
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.compile_utils import CompileMetrics
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.trainer import Trainer

from kerasdist.keras_seam.array_rows import (
    has_sparse,
    is_array_adapter,
    jax_rows,
    tensorflow_rows,
    torch_rows,
)
from kerasdist.keras_seam.data import (
    PyDataset,
    batches,
    copied,
    get_data_adapter,
    is_dataset,
    is_native_dataset,
    is_torch_dataloader,
    spec_of_rows,
    train_validation_split,
    yields_new_arrays,
)
from kerasdist.keras_seam.hooks import (
    OVERRIDDEN,
    PLACES,
    Hooks,
    install,
    install_apply_mask,
    install_dropout,
    install_in_build,
    install_in_torch_nn,
    install_in_variables,
    install_reads,
    install_scaled_apply,
    install_scope_reads,
    install_torch_adam,
)
from kerasdist.keras_seam.models import (
    BATCH_EVENTS,
    DIVIDES_ACTIVITY_PENALTY,
    KNOWS_SYNCHRONIZED,
    TRAIN_BATCH_EVENTS,
    backend_name,
    copy_thread_state,
    flat_layers,
    hears_of,
    initial_epoch,
    is_default,
    is_kerass_own,
    loss_tracker,
    ops,
    paste_thread_state,
    save_as,
    set_initial_epoch,
    skip_batches,
)
from kerasdist.keras_seam.optimizers import (
    LossScaleOptimizer,
    adam_slots,
    adopt_optimizer,
    apply_combined_gradients,
    apply_scaled_gradients,
    computes_on_gradients,
    optimized_variables,
    referenced_variables,
)
from kerasdist.keras_seam.randomness import (
    global_seed,
    global_seed_generator,
    is_seeded,
    keeps_or_mixes_draws,
    set_global_seed_generator,
)
from kerasdist.keras_seam.settings import settings
from kerasdist.keras_seam.tf_data import (
    auto_shard_policy,
    every_nth_file,
    is_tf_dataset,
    own_batches,
)
from kerasdist.keras_seam.trees import register_tree_node
from kerasdist.keras_seam.variables import (
    change_aggregation,
    initialize_waiting_variable,
    initialize_waiting_variables,
    make_anew,
    multiply_initializer,
    outside_stateless_scopes,
    stateless_scope,
    store_value,
    store_values,
    stored_dtype,
    stored_value,
    stored_values,
)

__all__ = [
    "BATCH_EVENTS",
    "DIVIDES_ACTIVITY_PENALTY",
    "KNOWS_SYNCHRONIZED",
    "OVERRIDDEN",
    "PLACES",
    "TRAIN_BATCH_EVENTS",
    "BackendTrainer",
    "BaseOptimizer",
    "CompileMetrics",
    "DataAdapter",
    "GeneratorDataAdapter",
    "Hooks",
    "Layer",
    "LossScaleOptimizer",
    "PyDataset",
    "Trainer",
    "adam_slots",
    "adopt_optimizer",
    "apply_combined_gradients",
    "apply_mask",
    "apply_scaled_gradients",
    "auto_shard_policy",
    "backend_name",
    "batches",
    "change_aggregation",
    "computes_on_gradients",
    "copied",
    "copy_thread_state",
    "every_nth_file",
    "flat_layers",
    "get_data_adapter",
    "global_seed",
    "global_seed_generator",
    "has_sparse",
    "hears_of",
    "initial_epoch",
    "initialize_waiting_variable",
    "initialize_waiting_variables",
    "install",
    "install_apply_mask",
    "install_dropout",
    "install_in_build",
    "install_in_torch_nn",
    "install_in_variables",
    "install_reads",
    "install_scaled_apply",
    "install_scope_reads",
    "install_torch_adam",
    "is_array_adapter",
    "is_dataset",
    "is_default",
    "is_kerass_own",
    "is_native_dataset",
    "is_seeded",
    "is_tf_dataset",
    "is_torch_dataloader",
    "jax_rows",
    "keeps_or_mixes_draws",
    "loss_tracker",
    "make_anew",
    "multiply_initializer",
    "ops",
    "optimized_variables",
    "outside_stateless_scopes",
    "own_batches",
    "paste_thread_state",
    "referenced_variables",
    "register_tree_node",
    "save_as",
    "set_global_seed_generator",
    "set_initial_epoch",
    "settings",
    "skip_batches",
    "spec_of_rows",
    "stateless_scope",
    "store_value",
    "store_values",
    "stored_dtype",
    "stored_value",
    "stored_values",
    "tensorflow_rows",
    "torch_rows",
    "train_validation_split",
    "unpack_x_y_sample_weight",
    "yields_new_arrays",
]
