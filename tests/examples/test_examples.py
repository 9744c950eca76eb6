"""Every example runs, on every backend, in a fresh process."""

import difflib
import re

import pytest

from tests.environment import path_of_users
from tests.fresh import ROOT, run_python

EXAMPLES = ROOT / "examples"
BACKENDS = ["tensorflow", "jax", "torch"]
TIME_LIMIT_S = 240  # of one run; a test has up to four

pytestmark = pytest.mark.timeout(4 * TIME_LIMIT_S)


def run(script, *arguments, backend):
    variables = {"KERAS_BACKEND": backend, "PYTHONPATH": path_of_users()}
    return run_python(EXAMPLES / script, *arguments, seconds=TIME_LIMIT_S, **variables)


def losses(output):
    return [float(number) for number in re.findall(r"-?\d+\.\d{4}", output)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_gan_on_two_devices_is_the_gan_on_one(backend):
    two = losses(run("digits_gan.py", "--epochs", "3", backend=backend))
    one = losses(run("digits_gan.py", "--epochs", "3", "--replicas", "1", backend=backend))
    assert len(two) == 6
    # Printed with four digits. Adam's first steps go by the sign of a gradient, so that rounding
    # near zero moves a weight by as much as a step; the losses hardly.
    assert two == pytest.approx(one, abs=2e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_transformer_learns(backend):
    small = "--blocks 1 --width 32 --length 8 --vocabulary 16 --batch 16 --steps 4 --epochs 4"
    found = losses(run("transformer.py", *small.split(), backend=backend))
    assert len(found) == 4
    assert found[-1] < found[0]


def test_the_ported_loop_prints_what_the_original_prints():
    before = losses(run("port/before.py", backend="tensorflow"))
    assert len(before) == 10
    for backend in BACKENDS:
        after = losses(run("port/after.py", backend=backend))
        if backend == "tensorflow":
            # 140 steps of Adam in another order of additions; printed with four digits.
            assert after == pytest.approx(before, abs=2e-3)
        assert after[-2] < 0.5  # the loss; other backends draw other initial weights
        assert after[-1] > 0.9  # the accuracy


def test_the_diff_in_the_guide_is_that_of_the_two_scripts():
    port = EXAMPLES / "port"
    before, after = ((port / f"{name}.py").read_text() for name in ("before", "after"))
    lines = difflib.unified_diff(
        before.splitlines(True), after.splitlines(True), "before.py", "after.py"
    )
    assert (port / "port.diff").read_text() == "".join(lines)
