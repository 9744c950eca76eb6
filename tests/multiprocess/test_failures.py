"""When a worker of a training job is lost, or does something else, all end and say why."""

import contextlib
import re

import pytest

from kerasdist.launch.exit_codes import ExitCode
from tests.conformance.registry import BACKENDS
from tests.multiprocess.processes import Processes, free_port, report

# For two processes to import a framework, and to compile, on a machine that does much else.
SECONDS = 150.0
HEARTBEAT = 6

LOSSES = {
    "be_killed_in_an_epoch": "worker 1 .* is lost: .* it was killed",
    "be_killed_in_validation": "worker 1 .* is lost: .* it was killed",
    "be_stopped_in_an_epoch": f"worker 1 .* has not given a sign of life for {HEARTBEAT} s",
}

DISAGREEMENTS = {
    "batches": "number of batches of x=7 on worker 1, 5 on worker 0",
    "epochs": "argument epochs=3 on worker 1, 2 on worker 0",
    "optimizer": r"optimizer.learning_rate=0.2\d* on worker 1, 0.1\d* on worker 0",
}


def _job(backend: str, behaviour: str) -> Processes:
    common = {
        "KERASDIST_WORKERS": "2",
        "KERASDIST_COORDINATOR": f"localhost:{free_port()}",
        "KERASDIST_HEARTBEAT_TIMEOUT": str(HEARTBEAT),
        "KERASDIST_MEETING_TIMEOUT": "60",
    }
    return Processes(
        [["-m", "tests.multiprocess.failing_script", backend, behaviour]] * 2,
        [{**common, "KERASDIST_RANK": str(rank)} for rank in range(2)],
    )


@pytest.fixture(scope="module", params=BACKENDS)
def jobs(request):
    """All jobs of a backend, begun together."""
    behaviours = [*LOSSES, "have_another_model"]
    with contextlib.ExitStack() as stack:
        yield {one: stack.enter_context(_job(request.param, one)) for one in behaviours}


@pytest.mark.parametrize("behaviour", LOSSES)
@pytest.mark.timeout(SECONDS + 60)
def test_the_survivor_ends_and_names_the_lost_worker(jobs, behaviour):
    ended = jobs[behaviour].join(SECONDS, but=[1] if "stopped" in behaviour else [])
    assert "striking" in ended[1].output, report(ended)
    assert ended[0].code == ExitCode.LOST_WORKER, report(ended)
    assert re.search(LOSSES[behaviour], ended[0].output), report(ended)
    assert "[worker 0/2]" in ended[0].output, report(ended)
    assert "came to the end" not in ended[0].output, report(ended)


@pytest.mark.parametrize("what", DISAGREEMENTS)
@pytest.mark.timeout(SECONDS + 60)
def test_workers_that_differ_are_told_where(jobs, what):
    ended = jobs["be_killed_in_an_epoch"].join(SECONDS)
    for worker in ended:
        pattern = f"refused {what}: .*{DISAGREEMENTS[what]}"
        assert re.search(pattern, worker.output), report(ended)
        assert "went on" in worker.output, report(ended)


@pytest.mark.timeout(SECONDS + 60)
def test_another_model_ends_the_job(jobs):
    ended = jobs["have_another_model"].join(SECONDS)
    assert [worker.code for worker in ended] == [1, 1], report(ended)
    for worker in ended:
        assert re.search(r"same variables. Received: .*kernel \(4, 9\)", worker.output), report(
            ended
        )
