"""Workers that record their collectives (`KERASDIST_DEBUG_COLLECTIVES=1`): a pair a backend."""

import re
from pathlib import Path

import pytest

from kerasdist.launch.placement import free_port
from tests.environment import CPU_DEVICES, values
from tests.multiprocess.processes import Processes, report

SECONDS = 900
WORKERS = 2
SCRIPT = "order_script"
COMMON = {
    "KERASDIST_WORKERS": str(WORKERS),
    "KERASDIST_DEBUG_COLLECTIVES": "1",
    "KERASDIST_MEETING_TIMEOUT": "100",
    "PYTHONWARNINGS": "ignore",
    **values(CPU_DEVICES),
}
BACKENDS = ("tensorflow", "jax", "torch")


def cases() -> list[tuple[str, str]]:
    """The backends and names of all cases, as the script's decorators say."""
    script = Path(__file__).with_name(f"{SCRIPT}.py").read_text(encoding="utf-8")
    found = re.findall(r"@case\((.*)\)\ndef (\w+)", script)
    return [
        (backend, name)
        for backend in BACKENDS
        for on, name in found
        if on == "*ALL" or f'"{backend}"' in on
    ]


@pytest.fixture(scope="module")
def ended():
    """How the workers of a backend ended; each pair runs once."""
    known = {}

    def of(backend):
        if backend not in known:
            common = {
                **COMMON,
                "KERAS_BACKEND": backend,
                "KERASDIST_COORDINATOR": f"localhost:{free_port()}",
            }
            environments = [{**common, "KERASDIST_RANK": str(rank)} for rank in range(WORKERS)]
            script = ["-m", f"tests.multiprocess.{SCRIPT}"]
            with Processes([script] * WORKERS, environments) as processes:
                known[backend] = processes.join(SECONDS)
        return known[backend]

    return of


@pytest.mark.parametrize(("backend", "name"), cases())
def test_case(ended, backend, name):
    workers = ended(backend)
    for one in workers:
        assert f"passed {name}\n" in one.output, report(workers)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ends_well(ended, backend):
    workers = ended(backend)
    assert [one.code for one in workers] == [0] * WORKERS, report(workers)


def test_all_workers_record_or_none():
    command = ["-m", "tests.multiprocess.job_script"]
    port = str(free_port())
    commands = [[*command, str(rank), "2", port, "wait_at_exit"] for rank in range(2)]
    environments = [{"KERASDIST_DEBUG_COLLECTIVES": one} for one in ("1", "0")]
    with Processes(commands, environments) as processes:
        workers = processes.join(60)
    said = "KERASDIST_DEBUG_COLLECTIVES=0 on worker 1, 1 on worker 0"
    for one in workers:
        assert one.code == 1, report(workers)
        assert said in one.output, report(workers)
