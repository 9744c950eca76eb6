"""The oldest Keras that is supported: tripwires, workers, and a case of each kind everywhere.

Everything else runs over the Keras of requirements/lock.txt, which is the newest. The oldest lies
in a folder of the same virtual environment that `make venv` fills; with it first on the path, fresh
processes find that one.
"""

import sys
from pathlib import Path

import pytest

from tests.fresh import ROOT, run_fresh, run_python
from tests.versions.selection import (
    BACKENDS,
    SUITES,
    TRIPWIRES,
    expect_good,
    first_on_the_path,
    start,
    suites,
)

OLDEST = Path(sys.prefix) / "oldest-keras"
PINS = ROOT / "requirements" / "oldest-keras.txt"
# What needs another framework beside the backend's, as this environment has it.
MORE = {"conformance": ("async_checkpoint.same_bytes",), "workers": ("shards.data_loader",)}


@pytest.fixture(scope="module", autouse=True)
def oldest_keras(tmp_path_factory):
    with first_on_the_path(OLDEST, tmp_path_factory.mktemp("results")):
        yield


@pytest.fixture(scope="module")
def runs(request, oldest_keras):
    """A suite's cases, on all backends that have it beside each other."""
    suite = request.param
    names = (*SUITES[suite], *MORE.get(suite, ()))
    having = [backend for backend in BACKENDS if suite in suites(backend)]
    started = {backend: start(backend, suite, names) for backend in having}
    yield started, len(names)
    for run in started.values():
        run.stop()


def test_it_is_the_pinned_one():
    found = run_fresh("import keras; print(keras.__version__)", KERAS_BACKEND="numpy").split()[-1]
    assert f"keras=={found}" in PINS.read_text("utf-8").splitlines(), "Call `make venv` again."


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_tripwires_hold(backend):
    run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", backend, *TRIPWIRES)


@pytest.mark.parametrize(
    ("runs", "backend"),
    [(suite, backend) for suite in SUITES for backend in BACKENDS if suite in suites(backend)],
    indirect=["runs"],
)
def test_equals_one_device(runs, backend):
    started, number = runs
    expect_good(started[backend], number)
