"""Custom loops on TensorFlow: the same calls on real ``tf.distribute`` objects and on ours."""

import json
import re
from pathlib import Path

import pytest

from tests.facade.side_by_side import replicas_of
from tests.fresh import run_python

SIDE_BY_SIDE = "tests.facade.side_by_side"
HOME = Path(__file__).with_name("side_by_side")
SECONDS = 1500
CASES = [
    (source.stem, name)
    for source in sorted(HOME.glob("*.py"))
    for name in re.findall(r"^@case\ndef (\w+)", source.read_text(), re.MULTILINE)
]


@pytest.fixture(scope="module")
def complaints():
    """What each case has to complain about, empty where all is well."""
    output = run_python("-m", SIDE_BY_SIDE, seconds=SECONDS, KERAS_BACKEND="tensorflow")
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize(("module", "case"), CASES)
def test_side_by_side(complaints, module, case):
    complaint = complaints[f"{replicas_of(case)} {module} {case}"]
    assert not complaint, complaint
