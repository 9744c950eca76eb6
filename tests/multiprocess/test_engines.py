"""What is a backend's own in its engine of many workers: one pair of real processes each."""

import re
from pathlib import Path

import pytest

from kerasdist.launch.placement import free_port
from tests.environment import CPU_DEVICES, values
from tests.multiprocess.processes import Processes, report

SECONDS = 900
WORKERS = 2
COMMON = {
    "KERASDIST_WORKERS": str(WORKERS),
    "KERASDIST_MEETING_TIMEOUT": "40",
    "PYTHONWARNINGS": "ignore",
}
# Two devices a worker on JAX, where a worker may have several.
OWN = {
    "jax": {"KERASDIST_CPU_DEVICES": "2", **values(CPU_DEVICES)},
    "torch": values(CPU_DEVICES),
}


def cases(backend: str) -> list[str]:
    script = Path(__file__).with_name(f"{backend}_script.py")
    return re.findall(r"@case\ndef (\w+)", script.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def ended():
    """How the workers of a backend ended; each pair runs once."""
    known = {}

    def of(backend):
        if backend not in known:
            known[backend] = run(backend)
        return known[backend]

    return of


def run(backend: str):
    common = {**COMMON, **OWN[backend], "KERASDIST_COORDINATOR": f"localhost:{free_port()}"}
    environments = [{**common, "KERASDIST_RANK": str(rank)} for rank in range(WORKERS)]
    script = ["-m", f"tests.multiprocess.{backend}_script"]
    with Processes([script] * WORKERS, environments) as processes:
        return processes.join(SECONDS)


@pytest.mark.parametrize(("backend", "name"), [(one, name) for one in OWN for name in cases(one)])
def test_case(ended, backend, name):
    workers = ended(backend)
    for one in workers:
        assert f"passed {name}\n" in one.output, report(workers)


@pytest.mark.parametrize("backend", OWN)
def test_ends_well(ended, backend):
    workers = ended(backend)
    assert [one.code for one in workers] == [0] * WORKERS, report(workers)
