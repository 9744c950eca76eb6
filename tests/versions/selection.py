"""What is run with each version: the tripwires, and a case of each kind of each suite.

    python -m tests.versions.selection jax [suite ...]

runs it in this environment, a line a case that fails; the exit status is the number of those.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conformance import registry, runner
from tests.conformance.runner import BackendRun, Result
from tests.multiprocess.layouts import PAIR, SHARDED, limits

BACKENDS = registry.BACKENDS
TRIPWIRES = ("tests/unit/test_keras_compat.py", "tests/unit/test_internals.py")

# A case for each hook, and for each thing that an older Keras does otherwise.
CONFORMANCE = (
    "async_checkpoint.faster_than_the_disk",
    "callbacks.callback_reads_and_writes",
    "callbacks.early_stopping",
    "losses.add_loss_mean",
    "losses.loss_weights",
    "losses.mean_with_sample_weight_masked_weighted",
    "losses.replica_all_masked",
    "losses.sum_over_batch_size_masked_weighted",
    "metrics.of_binary_classification",
    "metrics.of_the_user",
    "models.subclassed_model",
    "normalization.moving_statistics",
    "optimizers.accumulation",
    "optimizers.adam",
    "optimizers.ema_overwrite",
    "optimizers.loss_scale",
    "ragged.fewer_examples_than_replicas",
    "ragged.predict_in_order",
    "random.dropout",
    "saving.loaded_in_the_scope",
    "saving.saved_here_loaded_plain",
    "steps.train_step",
    "steps.two_optimizers",
    "training.on_batch_methods",
    "training.steps_per_execution_equals_single_steps",
)

# The same of custom loops: what they run, sum, differentiate, trace and hold.
FACADE = (
    "batch_norm.synchronized",
    "collectives.gradient_of_an_all_reduce",
    "collectives.sums_and_means_of_nests",
    "datasets.from_rows",
    "functions.a_compiled_step_is_traced_once",
    "functions.a_model_built_in_a_compiled_step",
    "gradients.gradients_of_models_with_state",
    "losses.compute_average_loss",
    "replica_context.merge_calls",
    "run.ragged_components",
    "training.adam_clipnorm",
    "training.keras_loss_objects",
    "values.reduce_values",
    "variables.metrics_in_steps",
)

# The same of what workers do.
WORKERS = (
    "data.generator",
    "data.py_dataset_uneven",
    "restarts.py_dataset",
    "shards.arrays_by_rows",
    "shards.pipeline_a_worker",
    "worker_callbacks.checkpoints",
    "worker_callbacks.metrics_reduction",
    "worker_callbacks.stop_in_an_epoch",
    "workers.custom_loop",
    "workers.equal_order",
    "workers.equal_results",
)

# The same with state that the workers divide; TensorFlow refuses `sharding=`.
SHARDED_STATE = (
    "layout_maps.as_one_device",
    "normalization.synchronised",
    "offload_workers.as_one_device",
    "optimizers.accumulation",
    "restarts.averages",
    "sharded_state.each_holds_its_part",
    "sharded_state.saved_and_loaded",
    "steps.two_optimizers",
)

SUITES = {
    "conformance": CONFORMANCE,
    "facade": FACADE,
    "workers": WORKERS,
    "sharded": SHARDED_STATE,
}
# A few of them: for what a run of the tests does beside the locked versions.
QUICK = {
    "conformance": (
        "normalization.moving_statistics",
        "optimizers.adam",
        "ragged.fewer_examples_than_replicas",
        "steps.train_step",
    ),
    "facade": ("run.ragged_components", "training.adam_clipnorm", "variables.metrics_in_steps"),
    "workers": ("workers.custom_loop", "workers.equal_results"),
    "sharded": ("optimizers.accumulation", "sharded_state.each_holds_its_part"),
}
_FACADE = "tests.facade"


def suites(backend: str, of: Mapping[str, Sequence[str]] = SUITES) -> dict[str, Sequence[str]]:
    """The suites that a backend has."""
    return {suite: of[suite] for suite in of if suite != "sharded" or SHARDED[backend]}


def start(backend: str, suite: str, names: Sequence[str] = ()) -> BackendRun:
    """Starts a suite's cases, all of the selection without names, in processes of their own."""
    names = names or SUITES[suite]
    if suite in ("workers", "sharded"):
        layout = PAIR if suite == "workers" else SHARDED[backend][0]
        return BackendRun.of_group(backend, names, str(layout), limits())
    if suite == "facade":
        return BackendRun(backend, _keys(backend, names, _FACADE), suite=_FACADE)
    return BackendRun(backend, _keys(backend, names, registry.CONFORMANCE))


def _keys(backend: str, names: Sequence[str], suite: str) -> list[str]:
    """Each case once: the numbers of replicas are no matter of a version."""
    first = {item.case.name: item.key for item in reversed([*registry.items(backend, suite)])}
    return [first[name] for name in names]


def bad(run: BackendRun, number: int) -> list[Result]:
    """Waits for all the cases of a run, and returns those that failed."""
    results = [*run.results()]
    assert len(results) == number, f"{len(results)} of {number} cases have run; see {run.log}"
    return [one for one in results if not one.good]


def expect_good(run: BackendRun, number: int):
    """Fails with what was wrong."""
    said = [f"{one.key}: {one.status}: {one.message}\n{one.traceback}" for one in bad(run, number)]
    assert not said, "\n\n".join(said)


@contextmanager
def first_on_the_path(folder: Path, results: Path) -> Iterator[None]:
    """Processes find the packages of a folder first; docs/support.md's results lie elsewhere."""
    assert folder.is_dir(), f"Expected packages in {folder}. Make it with `make venv`."
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setattr(runner, "RESULTS", results / "conformance")
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backend", choices=BACKENDS)
    parser.add_argument("suites", nargs="*", help=f"of {', '.join(SUITES)}; all without one")
    parser.add_argument("--results", type=Path, help="folder for their logs")
    arguments = parser.parse_args()
    if arguments.results:
        runner.RESULTS = arguments.results / "conformance"
    failed = 0
    for suite in arguments.suites or suites(arguments.backend):
        for one in bad(start(arguments.backend, suite), len(SUITES[suite])):
            failed += 1
            print(f"{one.key}: {one.status}: {one.message}\n{one.traceback}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
