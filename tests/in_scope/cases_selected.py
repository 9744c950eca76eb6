"""Cases of the exactness suite, which run here once more."""

import os
from dataclasses import replace

from tests import environment
from tests.conformance import registry

SUITE = "tests.in_scope"
# Of each kind of thing that a program does, one or two. On workers: `tests.multiprocess`.
SELECTED = frozenset(
    {
        "callbacks.callback_reads_and_writes",
        "data.tf_data",
        "models.subclassed_model",
        "normalization.synchronised",
        "own_data.nothing_built_eagerly",
        "ragged.fewer_examples_than_replicas",
        "reading.in_callbacks_and_after",
        "saving.saved_here_loaded_plain",
        "steps.train_step",
        "training.on_batch_methods",
    }
)
# Torch neither traces nor compiles: there, more, which `make test-everything` runs everywhere.
ON_TORCH = frozenset(
    {
        "callbacks.backup_and_restore",
        "callbacks.early_stopping",
        "callbacks.model_checkpoint",
        "data.py_dataset_uneven",
        "data.validation",
        "losses.in_call_of_a_model",
        "losses.regularizers",
        "losses.sample_weight",
        "metrics.of_the_user",
        "models.sequential_built_by_data",
        "optimizers.accumulation",
        "optimizers.adam",
        "optimizers.ema_overwrite",
        "optimizers.mixed_bfloat16",
        "ragged.predict_in_order",
        "random.dropout",
        "step_logs.renamed_logs_of_keras",
        "steps.two_optimizers",
        "training.optimizer_made_outside",
        "training.recompile",
        "training.second_fit",
    }
)


def register() -> None:
    everything = os.environ.get("KERASDIST_IN_SCOPE") == "all"
    cases = registry.load()
    for name, case in cases.items():
        if everything:
            registry.CASES[SUITE, name] = replace(case, like="")
        elif name in SELECTED | ON_TORCH:
            everywhere = name in SELECTED or environment.everything()
            backends = case.backends if everywhere else ("torch",)
            counts = case.replicas[:1]
            registry.CASES[SUITE, name] = replace(case, backends=backends, replicas=counts)
    if missing := (SELECTED | ON_TORCH) - set(cases):
        raise ValueError(f"Expected names of cases. Received: {sorted(missing)}. Rename them here.")


register()
