"""Cases of the exactness suite, which run here once more.

With ``KERASDIST_IN_SCOPE=all`` every case, else a selection.
"""

import os
from dataclasses import replace

from tests.conformance import registry

SUITE = "tests.in_scope"
# Of each kind of thing that a program does, one or two. On workers: `tests.multiprocess`.
SELECTED = frozenset(
    {
        "callbacks.backup_and_restore",
        "callbacks.callback_reads_and_writes",
        "data.tf_data",
        "losses.regularizers",
        "models.nested_models",
        "normalization.synchronised",
        "optimizers.ema_overwrite",
        "own_data.nothing_built_eagerly",
        "ragged.fewer_examples_than_replicas",
        "reading.in_callbacks_and_after",
        "saving.saved_here_loaded_plain",
        "steps.train_step",
        "training.on_batch_methods",
        "training.second_fit",
    }
)
# Torch neither traces nor compiles: there, more.
ON_TORCH = frozenset(
    {
        "callbacks.early_stopping",
        "callbacks.model_checkpoint",
        "data.py_dataset_uneven",
        "data.validation",
        "losses.in_call_of_a_model",
        "losses.sample_weight",
        "metrics.of_the_user",
        "models.sequential_built_by_data",
        "models.subclassed_model",
        "optimizers.accumulation",
        "optimizers.adam",
        "optimizers.mixed_bfloat16",
        "ragged.predict_in_order",
        "random.dropout",
        "saving.custom_class",
        "step_logs.renamed_logs_of_keras",
        "steps.two_optimizers",
        "training.optimizer_made_outside",
        "training.recompile",
    }
)


def register() -> None:
    everything = os.environ.get("KERASDIST_IN_SCOPE") == "all"
    cases = registry.load()
    for name, case in cases.items():
        if everything:
            registry.CASES[SUITE, name] = replace(case, like="")
        elif name in SELECTED | ON_TORCH:
            backends = case.backends if name in SELECTED else ("torch",)
            counts = case.replicas[:1]
            registry.CASES[SUITE, name] = replace(case, backends=backends, replicas=counts)
    if missing := (SELECTED | ON_TORCH) - set(cases):
        raise ValueError(f"Expected names of cases. Received: {sorted(missing)}. Rename them here.")


register()
