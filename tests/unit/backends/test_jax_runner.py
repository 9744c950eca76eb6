"""Custom loops on JAX: what is its own there, in one fresh process; and short steps."""

import json
import re
from pathlib import Path

import pytest

from tests.environment import CPU_DEVICES, suite_settings, values
from tests.fresh import ROOT, run_python

CASES = "tests.unit.backends.jax_cases"
NAMES = [
    name
    for file in sorted(Path(__file__).with_name("jax_cases").glob("*.py"))
    for name in re.findall(r"^@case\ndef (\w+)", file.read_text("utf-8"), flags=re.MULTILINE)
]


@pytest.fixture(scope="module")
def failures():
    settings = values(suite_settings("jax"))
    output = run_python("-m", CASES, seconds=900, KERAS_BACKEND="jax", **settings)
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_on_jax(name, failures):
    assert name not in failures, failures[name]


def test_short_steps_on_four_devices_finish():
    """See `jax/mesh/placement.py`. The process that stalls aborts after 40 seconds."""
    output = run_python(
        *("benchmarks/short_steps.py", "--here", "--steps", "2000", "--devices", "4"),
        seconds=600,
        KERAS_BACKEND="jax",
        **values(CPU_DEVICES),
        PYTHONPATH=str(ROOT),
    )
    assert "2000 steps" in output
