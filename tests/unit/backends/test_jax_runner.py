"""Custom loops on JAX: what is its own there, in one fresh process."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CASES = "tests.unit.backends.jax_runner_cases"
SOURCE = Path(__file__).with_name("jax_runner_cases.py").read_text(encoding="utf-8")
NAMES = re.findall(r"^@case\ndef (\w+)", SOURCE, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def failures():
    finished = subprocess.run(
        [sys.executable, "-m", CASES],
        cwd=ROOT,
        env=os.environ | {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_on_jax(name, failures):
    assert name not in failures, failures[name]
