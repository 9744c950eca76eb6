"""The batch script, run by a Slurm of one machine."""

import os
import signal
import sys
from pathlib import Path

import pytest

from kerasdist.job.interruption import ExitCode
from tests.fresh import ROOT, ended

SCRIPT = ROOT / "integrations" / "slurm" / "train.sbatch"
HERE = Path(__file__).parent
SECONDS = 120


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    for name in ("sbatch", "srun", "squeue", "scontrol"):
        command = tmp_path / name
        call = f'exec "{sys.executable}" "{HERE / "slurm.py"}" {name} "$@"'
        command.write_text(f"#!/bin/sh\n{call}\n", encoding="utf-8")
        command.chmod(0o755)
    (tmp_path / "python").symlink_to(sys.executable)
    path = (str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # the script sets its own value

    def submit(*task, state="RUNNING", **variables):
        (tmp_path / "state").write_text(state, encoding="utf-8")
        return ended(
            ["sbatch", "--nodes=1", "--ntasks-per-node=2", SCRIPT, HERE / "task.py", *task],
            seconds=SECONDS,
            PATH=os.pathsep.join(path),
            PYTHONPATH=str(ROOT),
            SLURM_STANDS_IN=str(tmp_path),
            **variables,
        )

    return submit


def report(rank):
    return f"{rank}: ['Slurm', [0, 1], {rank}, 2, '--epochs', '2 0'] threads=8"


def test_two_workers_after_the_time_limit_go_on(slurm, tmp_path):
    (tmp_path / "signal").touch()
    done = slurm("wait_for_the_signal", "--epochs", "2 0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [report(0), report(1)]
    assert "goes back into the queue" in done.stderr


def test_a_job_that_is_cancelled_stays_so(slurm, tmp_path):
    (tmp_path / "signal").touch()
    done = slurm("wait_for_the_signal", state="COMPLETING")
    assert done.returncode == ExitCode.PREEMPTED, done.stderr
    assert (done.stdout, list(tmp_path.glob("requeue"))) == ("", [])


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_worker_is_killed(slurm, tmp_path, restarts):
    done = slurm("be_killed_the_first_time", "--epochs", "2 0", MAX_RESTARTS=str(restarts))
    steps = len(list(tmp_path.glob("step-*")))
    if restarts:
        assert (done.returncode, steps) == (0, 2), done.stderr
        assert done.stdout.splitlines() == [report(0), report(1)]
        assert "starting them again, 1 of 2" in done.stderr
    else:
        assert (done.returncode, steps) == (128 + signal.SIGKILL, 1), done.stderr
        assert "worker 1 (process " in done.stderr
        assert done.stdout == ""
