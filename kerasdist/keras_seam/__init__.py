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

from kerasdist.keras_seam.data import (
    batches,
    get_data_adapter,
    is_dataset,
    is_native_dataset,
    spec_of_rows,
    train_validation_split,
)
from kerasdist.keras_seam.hooks import (
    OVERRIDDEN,
    PLACES,
    Hooks,
    install,
    install_apply_mask,
    install_dropout,
    install_in_build,
    install_in_variables,
    install_reads,
    install_scaled_apply,
    install_scope_reads,
)
from kerasdist.keras_seam.models import (
    DIVIDES_ACTIVITY_PENALTY,
    backend_name,
    copy_thread_state,
    flat_layers,
    is_kerass_own,
    loss_tracker,
    ops,
    paste_thread_state,
    save_as,
)
from kerasdist.keras_seam.optimizers import (
    LossScaleOptimizer,
    adopt_optimizer,
    apply_combined_gradients,
    apply_scaled_gradients,
    computes_on_gradients,
    optimized_variables,
    referenced_variables,
)
from kerasdist.keras_seam.randomness import (
    global_seed_generator,
    is_seeded,
    keeps_or_mixes_draws,
    set_global_seed_generator,
)
from kerasdist.keras_seam.variables import (
    change_aggregation,
    initialize_waiting_variable,
    initialize_waiting_variables,
    make_anew,
    multiply_initializer,
    outside_stateless_scopes,
    stateless_scope,
    store_value,
    stored_dtype,
    stored_value,
)

__all__ = [
    "DIVIDES_ACTIVITY_PENALTY",
    "OVERRIDDEN",
    "PLACES",
    "BackendTrainer",
    "BaseOptimizer",
    "CompileMetrics",
    "DataAdapter",
    "GeneratorDataAdapter",
    "Hooks",
    "Layer",
    "LossScaleOptimizer",
    "Trainer",
    "adopt_optimizer",
    "apply_combined_gradients",
    "apply_mask",
    "apply_scaled_gradients",
    "backend_name",
    "batches",
    "change_aggregation",
    "computes_on_gradients",
    "copy_thread_state",
    "flat_layers",
    "get_data_adapter",
    "global_seed_generator",
    "initialize_waiting_variable",
    "initialize_waiting_variables",
    "install",
    "install_apply_mask",
    "install_dropout",
    "install_in_build",
    "install_in_variables",
    "install_reads",
    "install_scaled_apply",
    "install_scope_reads",
    "is_dataset",
    "is_kerass_own",
    "is_native_dataset",
    "is_seeded",
    "keeps_or_mixes_draws",
    "loss_tracker",
    "make_anew",
    "multiply_initializer",
    "ops",
    "optimized_variables",
    "outside_stateless_scopes",
    "paste_thread_state",
    "referenced_variables",
    "save_as",
    "set_global_seed_generator",
    "spec_of_rows",
    "stateless_scope",
    "store_value",
    "stored_dtype",
    "stored_value",
    "train_validation_split",
    "unpack_x_y_sample_weight",
]
