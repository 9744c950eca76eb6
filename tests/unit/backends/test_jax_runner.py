"""Custom loops on JAX: what is its own there, in one fresh process."""

import json
import re
from pathlib import Path

import pytest

from tests.fresh import run_python

CASES = "tests.unit.backends.jax_runner_cases"
SOURCE = Path(__file__).with_name("jax_runner_cases.py").read_text(encoding="utf-8")
NAMES = re.findall(r"^@case\ndef (\w+)", SOURCE, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def failures():
    output = run_python("-m", CASES, seconds=280, KERAS_BACKEND="jax", JAX_PLATFORMS="cpu")
    return json.loads(output.splitlines()[-1])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_on_jax(name, failures):
    assert name not in failures, failures[name]
