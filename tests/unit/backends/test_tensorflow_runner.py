"""Custom loops on TensorFlow: the same calls on real ``tf.distribute`` objects and on ours."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

SIDE_BY_SIDE = "tests.unit.backends.tensorflow_side_by_side"
HOME = Path(__file__).with_name("tensorflow_side_by_side")
CASES = [
    (source.stem, name)
    for source in sorted(HOME.glob("*.py"))
    for name in re.findall(r"^@case\ndef (\w+)", source.read_text(), re.MULTILINE)
]
TIME_LIMIT_S = 110


@cache
def complaints(replicas, module):
    """What each case of a module has to complain about, empty where all is well."""
    done = subprocess.run(
        [sys.executable, "-m", SIDE_BY_SIDE, str(replicas), module],
        env=os.environ | {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"tensorflow is missing or broken:\n{done.stderr[-2000:]}"
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("module", "case"), CASES)
@pytest.mark.parametrize("replicas", [2, 3])
def test_side_by_side(replicas, module, case):
    complaint = complaints(replicas, module)[case]
    assert not complaint, complaint
