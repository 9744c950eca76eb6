"""Cases of the exactness suite and of the facade's, which run here once more."""

from tests.conformance import again

# What differs most there: sums in loops and branches, state that replicas might share, copies of
# variables, code that runs in the backward pass, and batches that are placed ahead.
SELECTED = frozenset(
    {
        "callbacks.callback_reads_and_writes",
        "executions.one_program",
        "executions.ragged_ends",
        "lookups.adamw",
        "losses.add_loss_mean",
        "models.state_that_layers_write",
        "models.sublayer_that_is_never_called",
        "normalization.rematerialized",
        "normalization.synchronised",
        "optimizers.accumulation",
        "optimizers.global_clipnorm_opposing",
        "optimizers.loss_scale_overflow",
        "random.dropout_in_a_cell",
        "random.masks_differ_by_replica",
        "ragged.fewer_examples_than_replicas",
        "steps.gradient_penalty",
        "steps.two_optimizers",
        "training.on_batch_methods",
        "training.steps_per_execution_equals_single_steps",
        "facade.collectives.booleans_have_no_sum",
        "facade.collectives.gradient_of_an_all_gather",
        "facade.collectives.sums_and_means_of_nests",
        "facade.collectives.types_together",
        "facade.datasets.input_options",
        "facade.datasets.rows_of_arrays",
        "facade.errors.unequal_numbers_of_all_reduces",
        "facade.extended.update_in_a_merge_call",
        "facade.functions.a_model_built_in_a_compiled_step",
        "facade.gradients.collectives_in_custom_gradients",
        "facade.gradients.gradients_of_gradients",
        "facade.training.adam_clipnorm",
        "facade.training.embeddings",
        "facade.variables.on_read_by_each_aggregation",
    }
)

# How the only pipeline of an epoch begins and ends, on TensorFlow: there each device has one of its
# own, see `tests/accelerators`.
NOT_HERE = frozenset({"cost.no_wait_for_a_tuner"})

again.register("tests.gpu_like", "KERASDIST_GPU_LIKE", {"": SELECTED}, left_out=NOT_HERE)
