"""A model that is larger than the memory of each worker is loaded."""

import sys

import pytest

from tests.environment import CPU_DEVICES, everything, values
from tests.fresh import ended
from tests.multiprocess.launching import finish

SCRIPT = "tests.multiprocess.weights_script"
SECONDS = 240
CASES = [("torch", "one.weights.h5", "full"), ("jax", "index.weights.json", "full")]
if everything():
    CASES += [
        ("jax", "one.weights.h5", "full"),
        ("torch", "index.weights.json", "full"),
        ("jax", "one.weights.h5", "map"),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights")
    # 576 MiB, or 1.5 GiB.
    made = ended([sys.executable, "-m", SCRIPT, "make", path, "8", "192" if everything() else "72"])
    assert made.returncode == 0, made.stdout + made.stderr
    yield path
    for file in path.glob("*.weights.*"):
        file.unlink()


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_weights_that_no_worker_could_hold(folder, case):
    backend, file, by = case
    call = ("run", "--workers", 2, "-m", SCRIPT, "load", folder / file, by)
    done = finish(*call, seconds=SECONDS, KERAS_BACKEND=backend, **values(CPU_DEVICES))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("at most") == 2, done.stdout + done.stderr
