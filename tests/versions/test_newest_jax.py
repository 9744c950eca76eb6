"""The newest JAX, on a Python that has one newer than the lock's: a few cases of each suite.

It lies in a folder of the same virtual environment, as the oldest Keras does. PyTorch's newest is
in `make versions` alone, since PyPI's build for Linux takes 5 GB. The newest TensorFlow is locked.
"""

import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.fresh import ROOT, run_fresh
from tests.versions.selection import QUICK, expect_good, first_on_the_path, start

NEWEST = Path(sys.prefix) / "newest-jax"
LINES = (ROOT / "requirements" / "newest-jax.txt").read_text("utf-8").splitlines()
PINS = [Requirement(line) for line in LINES if not line.startswith("#")]
FITS = [pin for pin in PINS if pin.marker is None or pin.marker.evaluate()]


def test_there_is_one_or_this_python_is_too_old():
    assert FITS or sys.version_info < (3, 12)


@pytest.fixture(scope="module")
def newest_jax(tmp_path_factory):
    with first_on_the_path(NEWEST, tmp_path_factory.mktemp("results")):
        code = "import jax, jaxlib; print(jax.__version__, jaxlib.__version__)"
        found = run_fresh(code).split()
        expected = [str(pin.specifier).removeprefix("==") for pin in FITS]
        assert found == expected, "Call `make venv` again."
        yield


@pytest.mark.parametrize("suite", QUICK if FITS else [])
def test_equals_one_device(suite, newest_jax):
    run = start("jax", suite, QUICK[suite])
    expect_good(run, len(QUICK[suite]))
    run.stop()
