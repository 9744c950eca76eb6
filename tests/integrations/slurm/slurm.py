"""A Slurm of one machine: what `sbatch`, `srun`, `squeue` and `scontrol` do for a batch script.

python slurm.py sbatch|srun|squeue|scontrol ARGUMENTS...

An option that is not known here is an error. In the folder $SLURM_STANDS_IN the file `signal` says
that the time limit comes in the first run, and the file `state` what squeue says.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ["SLURM_STANDS_IN"])
PREFIX = "#SBATCH "
JOB = "184213"


def sbatch(arguments):
    parser = argparse.ArgumentParser()
    for name in ("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task"):
        parser.add_argument(f"--{name}")
    for name in ("time", "signal", "output", "open-mode"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--requeue", action="store_true")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    script, *rest = parser.parse_args(arguments).script
    lines = Path(script).read_text(encoding="utf-8").splitlines()
    given = [line.removeprefix(PREFIX) for line in lines if line.startswith(PREFIX)]
    options = parser.parse_args([*given, *arguments])  # the command line overrides the script
    assert options.signal.startswith("TERM@"), options.signal
    assert (options.nodes, options.ntasks_per_node) == ("1", "2"), "this machine has no more"
    variables = {
        "SLURM_JOB_ID": JOB,
        "SLURM_JOB_NAME": options.job_name,
        "SLURM_JOB_NODELIST": socket.gethostname(),
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_TASKS_PER_NODE": "2",
        "SLURM_CPUS_PER_TASK": options.cpus_per_task,
        # Of the batch script itself, which is the first task of a step that is none.
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
    }
    restarts = 0
    while True:
        variables |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
        code = subprocess.run(
            ["bash", script, *rest], env={**os.environ, **variables}, check=False
        ).returncode
        if not (FOLDER / "requeue").exists():
            return code
        (FOLDER / "requeue").unlink()
        restarts += 1


def srun(arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("--label", action="store_true")
    parser.add_argument("--kill-on-bad-exit", choices="0")
    parser.add_argument("--wait", type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    assert options.label
    command = options.command
    step = str(len(list(FOLDER.glob("step-*"))))
    (FOLDER / f"step-{step}").touch()
    common = {
        "SLURM_STEP_ID": step,
        "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }
    tasks = [
        subprocess.Popen(
            command,
            env={**os.environ, **common, "SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(2)
    ]
    if (FOLDER / "signal").exists() and step == "0":
        while not all((FOLDER / f"ready-{n}").exists() for n in range(2)):
            assert all(task.poll() is None for task in tasks)
            time.sleep(0.02)
        for task in tasks:
            with contextlib.suppress(ProcessLookupError):
                task.send_signal(signal.SIGTERM)
    for n, task in enumerate(tasks):  # what --label does; nobody here writes much
        for line in task.communicate()[0].splitlines():
            print(f"{n}: {line}")
    codes = [task.returncode for task in tasks]
    return max(128 - code if code < 0 else code for code in codes)


def squeue(arguments):
    assert arguments == ["--noheader", f"--jobs={JOB}", "--format=%T"], arguments
    print((FOLDER / "state").read_text(encoding="utf-8"))
    return 0


def scontrol(arguments):
    assert arguments == ["requeue", JOB], arguments
    (FOLDER / "requeue").touch()
    return 0


if __name__ == "__main__":
    commands = {"sbatch": sbatch, "srun": srun, "squeue": squeue, "scontrol": scontrol}
    sys.exit(commands[sys.argv[1]](sys.argv[2:]))
