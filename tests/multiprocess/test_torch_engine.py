"""The torch engine of many workers, in real processes: one pair for all cases."""

import re
from pathlib import Path

import pytest

from tests.multiprocess.processes import Processes, free_port, report

SCRIPT = "tests.multiprocess.torch_script"
SECONDS = 150
WORKERS = 2
CASES = re.findall(
    r"@case\ndef (\w+)", Path(__file__).with_name("torch_script.py").read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def ended():
    common = {
        "KERASDIST_WORKERS": str(WORKERS),
        "KERASDIST_COORDINATOR": f"localhost:{free_port()}",
        "KERASDIST_MEETING_TIMEOUT": "40",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
    }
    environments = [{**common, "KERASDIST_RANK": str(rank)} for rank in range(WORKERS)]
    with Processes([["-m", SCRIPT]] * WORKERS, environments) as processes:
        return processes.join(SECONDS)


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("name", CASES)
def test_case(ended, name):
    for one in ended:
        assert f"passed {name}\n" in one.output, report(ended)


@pytest.mark.timeout(SECONDS + 30)
def test_ends_well(ended):
    assert [one.code for one in ended] == [0] * WORKERS, report(ended)
