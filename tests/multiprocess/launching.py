"""Scripts of a few lines as workers, and what is left of them."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from kerasdist.cli.launch import start
from kerasdist.cli.launch.job import run_job
from kerasdist.cli.launch.placement import free_port
from kerasdist.cli.launch.spec import JobResult, JobSpec, python_command
from tests.fresh import ROOT, ended
from tests.multiprocess.forks import Ended

SECONDS = 90

HEAD = """
import os, signal, subprocess, sys, time
from pathlib import Path
rank, restart = int(os.environ["KERASDIST_RANK"]), int(os.environ["KERASDIST_RESTART"])
here = Path(__file__).parent
def mark(name):
    (here / name).write_text(str(os.getpid()))
def wait_for(*names):
    while not all((here / name).exists() for name in names):
        time.sleep(0.01)
"""


def write(folder: Path, body: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(HEAD + body, encoding="utf-8")
    return path


def run(folder: Path, body: str, *arguments: str, **spec) -> JobResult:
    command = python_command(str(write(folder, body)), arguments)
    return run_job(JobSpec(command, **{"workers": 2, "stop_seconds": 5.0, **spec}))


def job_of(workers: int, host: str = "localhost", **more: str) -> list[dict[str, str]]:
    """The variables of each worker of a job that no launcher starts."""
    coordinator = f"{host}:{free_port()}"
    job = {"KERASDIST_WORKERS": str(workers), "KERASDIST_COORDINATOR": coordinator, **more}
    return [{**job, "KERASDIST_RANK": str(rank)} for rank in range(workers)]


def command_line(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "kerasdist", *(str(each) for each in arguments)]


def finish(
    *arguments: object, seconds: float = SECONDS, **environment: str
) -> subprocess.CompletedProcess[str]:
    return ended(command_line(*arguments), seconds=seconds, **environment)


def said(done: subprocess.CompletedProcess[str]) -> str:
    """What the launcher wrote to its error output, without the first line, which it always has."""
    first, _, rest = done.stderr.partition("\n")
    assert re.fullmatch(r"\[kerasdist\] \d+ workers? on .+, backend \w+ \(.+\)", first), first
    return rest


def beside(
    *arguments: str, rank: int = 0, seconds: float = SECONDS, **environment: str
) -> Future[Ended]:
    """Runs Python beside the test, and returns how the process ended."""

    def run() -> Ended:
        began = time.monotonic()
        done = ended([sys.executable, *arguments], seconds=seconds, **environment)
        return Ended(rank, done.returncode, time.monotonic() - began, done.stdout + done.stderr)

    return _THREADS.submit(run)


_THREADS = ThreadPoolExecutor()


@contextlib.contextmanager
def started(*arguments: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Starts the command line, and sees to it that it ends."""
    with running(command_line(*arguments), **environment) as process:
        yield process


@contextlib.contextmanager
def running(command: Sequence[str | Path], **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Starts a command, and sees to it that it ends."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def supervised(
    orders: dict, command: Sequence[str] = start.SUPERVISOR_HERE, **options
) -> subprocess.Popen[str]:
    """Starts a supervisor; its input is open for as long as the launcher is there."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes, **options)
    process.stdin.write(f"{json.dumps(orders)}\n")
    process.stdin.flush()
    return process


def wait_for(folder: Path, *names: str) -> list[int]:
    """Waits until the workers have made their marks, and returns what the marks say."""
    end = time.monotonic() + SECONDS
    while not all((folder / name).exists() and (folder / name).read_text() for name in names):
        assert time.monotonic() < end, f"no {names} in {sorted(folder.iterdir())}"
        time.sleep(0.01)
    return [int((folder / name).read_text()) for name in names]


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state.split()[0] != "Z"


def left_after(processes: list[int], seconds: float) -> list[int]:
    """Returns which of `processes` still run after `seconds`, and ends them."""
    end = time.monotonic() + seconds
    while (left := [each for each in processes if alive(each)]) and time.monotonic() < end:
        time.sleep(0.02)
    for each in left:
        os.kill(each, signal.SIGKILL)
    return left
