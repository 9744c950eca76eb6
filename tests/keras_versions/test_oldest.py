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

OLDEST = Path(sys.prefix) / "keras-oldest"
PINS = ROOT / "requirements" / "oldest-keras.txt"
TRIPWIRES = ("tests/unit/test_keras_seam.py", "tests/unit/test_keras_seam_data.py")
TRIPWIRE_SECONDS = 110
WORKERS = "tests/multiprocess/test_one_device.py"
BACKENDS = registry.BACKENDS
SECONDS = 400

# A case for each hook, and for each thing that an older Keras does otherwise.
CASES = (
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


@pytest.fixture(scope="module", autouse=True)
def oldest_keras():
    """Every process that a test here starts imports the oldest Keras."""
    assert (OLDEST / "keras").is_dir(), f"Expected Keras in {OLDEST}. Make it with `make venv`."
    path = os.pathsep.join(filter(None, [str(OLDEST), os.environ.get("PYTHONPATH")]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        yield


@pytest.fixture(scope="module")
def runs(oldest_keras, tmp_path_factory):
    """The cases, on all backends beside each other."""
    with pytest.MonkeyPatch.context() as patch:
        # The whole suite's results, from which docs/support.md is written, lie where they lie.
        patch.setattr(runner, "RESULTS", tmp_path_factory.mktemp("conformance"))
        running = {backend: runner.BackendRun(backend, keys(backend)) for backend in BACKENDS}
        yield running
        for run in running.values():
            run.stop()


def keys(backend):
    """Each case once: the numbers of replicas are no matter of the version of Keras."""
    first = {item.case.name: item.key for item in reversed([*registry.items(backend)])}
    return [first[name] for name in CASES]


def test_it_is_the_pinned_one():
    found = run_fresh("import keras; print(keras.__version__)", KERAS_BACKEND="numpy").split()[-1]
    assert f"keras=={found}" in PINS.read_text("utf-8").splitlines(), "Call `make venv` again."


def test_the_tripwires_hold():
    pass_alone(TRIPWIRE_SECONDS, *TRIPWIRES)


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_workers_equal_one_device(backend):
    pass_alone(SECONDS - 10, WORKERS, "-k", f"{backend} and 2x1")


def pass_alone(seconds, *arguments):
    """Expects tests of this suite to pass, in a process that finds the oldest Keras."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_one_device(backend, runs):
    results = [*runs[backend].results()]
    bad = [f"{one.key}: {one.status}: {one.message}" for one in results if not one.good]
    assert not bad, "\n\n".join(bad)
    assert [one.key for one in results] == keys(backend)
