"""When a worker of a training job is lost, or does something else, all end and say why."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from kerasdist.job.interruption import ExitCode
from tests.conformance.registry import BACKENDS
from tests.environment import everything
from tests.multiprocess.forks import Ended, Job, nursery, report, require
from tests.multiprocess.launching import beside, job_of
from tests.multiprocess.networks import CHIEF

# For two processes to import a framework, and to compile, on a machine that does much else.
SECONDS = 900.0
HEARTBEAT = 6
SCRIPT = "tests.multiprocess.failing_script"
OLDEST = Path(sys.prefix) / "oldest-keras"

LOSSES = {
    "be_killed_in_compile": "worker 1 .* is lost: .* it was killed",
    "be_killed_in_an_epoch": "worker 1 .* is lost: .* it was killed",
    "be_killed_in_a_compiled_loop": "the step raised .*worker 1 .* is lost: .* it was killed",
    "be_stopped_in_an_epoch": f"worker 1 .* has not given a sign of life for {HEARTBEAT} s",
    "be_cut_off": f"worker 1 .*sign of life for {HEARTBEAT} s: .* is cut off from the network",
}
# Elsewhere the survivor waits as for one that is cut off; torch compiles nothing.
ON = {
    "be_stopped_in_an_epoch": ("torch",),
    "be_killed_in_compile": ("tensorflow", "jax") if everything() else ("jax",),
}


def _losses(backend: str) -> list[str]:
    return [behaviour for behaviour in LOSSES if backend in ON.get(behaviour, BACKENDS)]


def _environments(folder: Path, restart: int = 0, host: str = "localhost") -> list[dict[str, str]]:
    return job_of(
        2,
        host,
        KERASDIST_HEARTBEAT_TIMEOUT=str(HEARTBEAT),
        KERASDIST_MEETING_TIMEOUT="60",
        KERASDIST_RESTART=str(restart),
        FOLDER=str(folder),
    )


class Jobs:
    def __init__(self, backend: str, folder: Path):
        self.backend = backend
        self._folder = folder
        self._waiting = [*_losses(backend), "have_data_that_ends", "be_preempted"]
        self._begun: dict[str, Job] = {}

    def __getitem__(self, behaviour: str) -> Job:
        while behaviour not in self._begun:
            self._begin_next()
        if self._waiting:
            self._begin_next()
        return self._begun[behaviour]

    def _begin_next(self):
        behaviour = self._waiting.pop(0)
        self._begun[behaviour] = self.begin(behaviour)

    def begin(self, behaviour: str, restart: int = 0) -> Job:
        folder = self._folder / behaviour
        folder.mkdir(exist_ok=True)
        host = CHIEF if behaviour == "be_cut_off" else "localhost"
        return self._fork(behaviour, _environments(folder, restart, host))

    def _fork(self, behaviour: str, environments: list[dict[str, str]]) -> Job:
        return nursery(self.backend).begin([SCRIPT, self.backend, behaviour], environments)

    def with_another(self, backend: str, **variables: str) -> list[Ended]:
        """The workers of a job of which the second one has another backend, or other variables."""
        here, there = _environments(self._folder)
        command = ("-m", SCRIPT, backend, "only_join")
        other = beside(*command, rank=1, seconds=SECONDS, **there, **variables)
        return [*self._fork("only_join", [here]).join(SECONDS), other.result()]


@pytest.fixture(scope="module", params=BACKENDS)
def jobs(request, tmp_path_factory):
    return Jobs(request.param, tmp_path_factory.mktemp(request.param))


def test_the_survivor_ends_and_names_the_lost_worker(jobs):
    for behaviour in _losses(jobs.backend):
        ended = jobs[behaviour].join(SECONDS, but=[1] if "stopped" in behaviour else [])
        assert "striking" in ended[1].output, report(ended)
        assert ended[0].code == ExitCode.LOST_WORKER, report(ended)
        assert re.search(LOSSES[behaviour], ended[0].output), report(ended)
        assert "[worker 0/2]" in ended[0].output, report(ended)
        assert "came to the end" not in ended[0].output, report(ended)


def test_both_sides_of_a_partition_name_the_other(jobs):
    cut_off = jobs["be_cut_off"].join(SECONDS)[1]
    assert cut_off.code == ExitCode.LOST_WORKER, report([cut_off])
    said = f"the chief, worker 0, has not given a sign of life for {HEARTBEAT} s: .* is cut off"
    assert re.search(said, cut_off.output), report([cut_off])


def test_data_that_end_early_end_the_job_at_once(jobs):
    ended = jobs["have_data_that_ends"].join(SECONDS)
    said = (
        "the workers do not train on the same batches: batch 4='none, at the end of its data' on "
        r"worker 1, 'trains on batch [45]' on worker 0"  # JAX starts a step ahead
    )
    require(ended, 1, said)


def test_a_layer_that_one_worker_freezes_in_an_epoch_is_named(jobs):
    ended = jobs.begin("freeze_a_layer").join(SECONDS)
    said = "same trainable weights at the end of batch 3 of epoch 1.*kernel=False on (this )?worker"
    assert re.search(said, ended[1].output), report(ended)
    assert re.search(f"{said}|it ended with DisagreementError", ended[0].output), report(ended)


@pytest.mark.parametrize("jobs", ["jax"], indirect=True)
def test_a_later_program_that_differs_is_named(jobs):
    """On JAX alone a program has the collectives of all; they wait until none has gone on."""
    ended = jobs.begin("hang_in_a_later_program").join(SECONDS)
    said = r"batch 6='.* program \w+' on worker 1, '.* program \w+' on worker 0"
    for worker in ended:
        assert re.search(said, worker.output), report(ended)
        assert "came to the end" not in worker.output, report(ended)


@pytest.mark.parametrize("jobs", ["jax"], indirect=True)
def test_one_worker_alone_reads(jobs):
    ended = jobs.begin("read_alone").join(SECONDS)
    said = r"come apart: .*worker 0 is at .read of the sharded variable 'small/\w+/kernel'"
    require(ended, 1, said)


@pytest.mark.parametrize("jobs", ["torch"], indirect=True)  # who compares, knows no backend
def test_one_worker_alone_reduces(jobs):
    ended = jobs.begin("reduce_alone").join(SECONDS)
    said = "it came to the end of its script, but worker 1 is at 'step 2 of reduce'"
    require(ended[1:], ExitCode.LOST_WORKER, said)


def test_ctrl_c_ends_training_with_a_line_per_worker(jobs):
    ended = jobs.begin("be_interrupted_in_an_epoch").join(SECONDS)
    own = r"\[worker \d/2\] interrupted \(Ctrl-C\) at \S+failing_script.py:\d+(; then .*)?$"
    others = r"\[worker \d/2\] worker \d .* is lost: it ended with Ctrl-C. This worker was waiting"
    assert any(re.search(own, worker.output, re.MULTILINE) for worker in ended), report(ended)
    for worker in ended:
        assert len(re.findall(f"{own}|{others}", worker.output, re.MULTILINE)) == 1, report(ended)
        assert "Traceback" not in worker.output, report(ended)
        assert worker.code in (1, -signal.SIGINT, -signal.SIGALRM, ExitCode.LOST_WORKER)


@pytest.mark.parametrize("jobs", ["torch"], indirect=True)  # who compares, knows no backend
def test_another_version_of_keras_ends_the_job(jobs):
    path = os.pathsep.join(filter(None, [str(OLDEST), os.environ.get("PYTHONPATH")]))
    ended = jobs.with_another(jobs.backend, PYTHONPATH=path)
    said = r"DisagreementError: .*same versions. Received: keras='3[\d.]+' on worker 1, '3[\d.]+'"
    require(ended, 1, said)


@pytest.mark.parametrize("jobs", ["torch"], indirect=True)
def test_another_backend_ends_the_job(jobs):
    ended = jobs.with_another("jax")
    said = "DisagreementError: .*same versions. Received: backend='jax' on worker 1, 'torch' on w"
    require(ended, 1, said)


def test_a_preempted_run_goes_on_at_the_next_batch(jobs):
    """Signals to either worker; on the second time all processes end, and are started again."""
    ended = jobs["be_preempted"].join(SECONDS)
    for worker in ended:
        assert worker.code == ExitCode.PREEMPTED, report(ended)
        # The other worker may have begun the next batches; then all leave after the last of them.
        left = "012( left with 76 34|3 left with 76 4|34 left with 76 )01234 equal 0123?4?"
        assert re.fullmatch(TWO_EPOCHS + left, _course(worker.output)), report(ended)
    again = jobs.begin("be_preempted", restart=1).join(SECONDS)
    for worker in again:
        assert worker.code == 0, report(again)
        assert re.fullmatch(f"{TWO_EPOCHS}(3?4)?01234 equal", _course(worker.output)), report(again)


TWO_EPOCHS = "0123401234"


def _course(output: str) -> str:
    """The batches of a worker, and what it says between them."""
    found = re.findall(r"(?<=batch )\d|left with 76|equal", output)
    return "".join(one if one.isdigit() else f" {one} " for one in found).strip()
