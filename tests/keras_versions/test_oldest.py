"""The oldest Keras that is supported: tripwires, workers, and a case of each kind everywhere.

Everything else runs over the Keras of requirements/lock.txt, which is the newest. The oldest lies
in a folder of the same virtual environment that `make venv` fills; with it first on the path, fresh
processes find that one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance import registry, runner
from tests.fresh import ROOT, run_fresh
from tests.multiprocess.layouts import PAIR, limits

OLDEST = Path(sys.prefix) / "oldest-keras"
PINS = ROOT / "requirements" / "oldest-keras.txt"
TRIPWIRES = ("tests/unit/test_keras_compat.py", "tests/unit/test_keras_compat_data.py")
TRIPWIRE_SECONDS = 900
BACKENDS = registry.BACKENDS
SECONDS = 1500

# A case for each hook, and for each thing that an older Keras does otherwise.
CASES = (
    "async_checkpoint.same_bytes",
    "callbacks.callback_reads_and_writes",
    "data.validation_split",
    "losses.activity_regularizer",
    "losses.add_loss_mean",
    "losses.loss_weights",
    "losses.masking_and_pooling",
    "losses.mean_with_sample_weight_masked_weighted",
    "losses.sample_weight_all_zero_on_a_replica",
    "losses.sum_over_batch_size_masked_weighted",
    "metrics.of_binary_classification",
    "metrics.state_is_a_maximum",
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

# The same of what workers do.
WORKER_CASES = (
    "data.generator",
    "data.py_dataset_uneven",
    "shards.arrays_by_rows",
    "shards.data_loader",
    "shards.pipeline_a_worker",
    "worker_callbacks.backup_and_restore",
    "worker_callbacks.checkpoints",
    "worker_callbacks.metrics_reduction",
    "worker_callbacks.stop_in_an_epoch",
    "workers.custom_loop",
    "workers.equal_order",
    "workers.equal_results",
    "workers.mixed_float16",
)


@pytest.fixture(scope="module", autouse=True)
def oldest_keras():
    """Every process that a test here starts imports the oldest Keras."""
    assert (OLDEST / "keras").is_dir(), f"Expected Keras in {OLDEST}. Make it with `make venv`."
    path = os.pathsep.join(filter(None, [str(OLDEST), os.environ.get("PYTHONPATH")]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        yield


@pytest.fixture(scope="module")
def results_elsewhere(tmp_path_factory):
    """The whole suite's results, from which docs/support.md is written, lie where they lie."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "RESULTS", tmp_path_factory.mktemp("results") / "conformance")
        yield


@pytest.fixture(scope="module")
def runs(oldest_keras, results_elsewhere):
    """The cases, on all backends beside each other."""
    yield from running(lambda backend: runner.BackendRun(backend, keys(backend)))


@pytest.fixture(scope="module")
def pairs(oldest_keras, results_elsewhere):
    """The workers' cases, likewise."""
    yield from running(
        lambda backend: runner.BackendRun.of_group(backend, WORKER_CASES, str(PAIR), limits())
    )


def running(start):
    started = {backend: start(backend) for backend in BACKENDS}
    yield started
    for run in started.values():
        run.stop()


def keys(backend):
    """Each case once: the numbers of replicas are no matter of the version of Keras."""
    first = {item.case.name: item.key for item in reversed([*registry.items(backend)])}
    return [first[name] for name in CASES]


def test_it_is_the_pinned_one():
    found = run_fresh("import keras; print(keras.__version__)", KERAS_BACKEND="numpy").split()[-1]
    assert f"keras=={found}" in PINS.read_text("utf-8").splitlines(), "Call `make venv` again."


def test_the_tripwires_hold():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TRIPWIRES]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=TRIPWIRE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_one_device(backend, runs):
    expect_good(runs[backend], keys(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_workers_equal_one_device(backend, pairs):
    expect_good(pairs[backend], WORKER_CASES)


def expect_good(run, wanted):
    results = [*run.results()]
    bad = [one for one in results if not one.good]
    told = (f"{one.key}: {one.status}: {one.message}\n{one.traceback}" for one in bad)
    assert not bad, "\n\n".join(told)
    assert [one.key for one in results] == list(wanted)
