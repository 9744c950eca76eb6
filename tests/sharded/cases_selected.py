"""Cases of the exactness suite and of the facade's, which run here once more.

With ``KERASDIST_SHARDED=all`` every case in both ways, else a selection. The name of a case begins
with what is divided: ``full.optimizers.accumulation``.
"""

from tests.conformance import again

# What reads or writes state by itself, and what goes over all weights at once.
SELECTED = {
    "full": {
        "callbacks.callback_reads_and_writes",
        "executions.ragged_ends",
        "losses.regularizers",
        "models.sequential_built_by_data",
        "models.state_that_layers_write",
        "normalization.synchronised",
        "optimizers.accumulation",
        "optimizers.adafactor",
        "optimizers.ema_overwrite",
        "optimizers.global_clipnorm_opposing",
        "optimizers.loss_scale_overflow",
        "random.dropout_in_a_cell",
        "ragged.fewer_examples_than_replicas",
        "steps.gradient_penalty",
        "steps.two_optimizers",
        "training.on_batch_methods",
        "training.steps_per_execution_equals_single_steps",
        "facade.functions.a_model_built_in_a_compiled_step",
        "facade.training.adam_clipnorm",
        "facade.training.embeddings",
    },
    "optimizer": {
        "executions.ragged_ends",
        "optimizers.accumulation",
        "optimizers.ema_at_the_end",
        "optimizers.loss_scale_overflow",
        "training.steps_per_execution_equals_single_steps",
        "facade.training.adam_clipnorm",
        "facade.training.embeddings",
    },
}

again.register("tests.sharded", "KERASDIST_SHARDED", SELECTED, backends=("jax",))
