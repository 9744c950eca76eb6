"""Workers that are forked from a process that has imported a framework, and not started it.

To import one costs more than what most workers do. A script that wants its workers so calls
`wait_to_be_one` behind its imports; the tests hold the process that waits as a `Nursery`.

python -m tests.multiprocess.forks BACKEND      waits to be any module or script, with its arguments
"""

import atexit
import contextlib
import functools
import json
import os
import re
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.environment import WORKERS, values

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    """How a process ended; `code` is None for one that had to be killed."""

    rank: int
    code: int | None
    seconds: float
    output: str


def report(ended: Sequence[Ended]) -> str:
    return "\n".join(
        f"----- worker {one.rank}: exit code {one.code} after {one.seconds:.1f} s\n{one.output}"
        for one in ended
    )


def require(ended: Sequence[Ended], code: int, said: str):
    """All have ended with a code, and say why."""
    for one in ended:
        assert one.code == code, report(ended)
        assert re.search(said, one.output), report(ended)


def wait_to_be_one():
    """Forks a process for each order and reports its end; returns only in forked processes."""
    ranks: dict[int, int] = {}
    while True:
        # Who has forked nothing has nothing to look after: several such processes wait in a run.
        readable, _, _ = select.select([0], [], [], 0.02 if ranks else None)
        order = os.read(0, 1 << 16) if readable else None
        if order == b"":
            os._exit(0)
        for line in (order or b"").splitlines():
            number, arguments, environment, log = json.loads(line)
            child = os.fork()
            if child == 0:
                _become(arguments, environment, log)
                return
            ranks[child] = number
            _tell("began", number, child)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                _tell("ended", ranks.pop(ended[0]), os.waitstatus_to_exitcode(ended[1]))


def _tell(*words: object):
    os.write(1, json.dumps(words).encode() + b"\n")


def _become(arguments: Sequence[str], environment: Mapping[str, str], log: str):
    os.setsid()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(file, 1)
    os.dup2(file, 2)


class Fork:
    """A fork of this process that runs a function; its output is read from pipes, as it comes."""

    def __init__(self, function: Callable[[], None], environment: Mapping[str, str]):
        pipes = [os.pipe(), os.pipe()]
        self._code: int | None = None
        self._pid = os.fork()
        if self._pid == 0:
            os.environ.update(environment)
            for number, (_, written) in enumerate(pipes, 1):
                os.dup2(written, number)
            for one in (descriptor for pipe in pipes for descriptor in pipe):
                os.close(one)
            _run(function)
        for _, written in pipes:
            os.close(written)
        self.stdout, self.stderr = (os.fdopen(read, errors="replace") for read, _ in pipes)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, seconds: float) -> int:
        deadline = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self._pid} does not end")
            time.sleep(0.02)
        return code

    def kill(self):
        if self.poll() is None:
            os.kill(self._pid, signal.SIGKILL)


def _run(function: Callable[[], None]):
    try:
        function()
    except BaseException:  # noqa: BLE001 (what follows is the other process's)
        traceback.print_exc()
    os._exit(1)


class Nursery:
    """The process that waits, and those that it has forked; leaving the block ends all."""

    def __init__(self, *command: str, **environment: str):
        self._folder = tempfile.TemporaryDirectory()
        self._errors = Path(self._folder.name) / "errors"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env={**os.environ, **values(WORKERS), **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        os.set_blocking(self._process.stdout.fileno(), False)
        self._heard = b""
        self.logs: list[Path] = []
        self.pids: dict[int, int] = {}
        self.ended: dict[int, tuple[int, float]] = {}

    def begin(self, arguments: Sequence[str], environments: Sequence[Mapping[str, str]]) -> "Job":
        first = len(self.logs)
        for environment in environments:
            number = len(self.logs)
            self.logs.append(Path(self._folder.name) / str(number))
            order = [number, arguments, environment, str(self.logs[-1])]
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        return Job(self, range(first, len(self.logs)))

    def listen(self):
        if self._process.poll() is not None:
            raise RuntimeError(self._errors.read_text("utf-8", "replace"))
        self._heard += self._process.stdout.read() or b""
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            what, number, value = json.loads(line)
            if what == "began":
                self.pids[number] = value
            else:
                self.ended[number] = value, time.monotonic()

    def kill(self, numbers: Iterable[int]):
        """Kills those of some workers that have not ended."""
        for number in numbers:
            if number in self.pids and number not in self.ended:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pids[number], signal.SIGKILL)

    def __enter__(self) -> "Nursery":
        return self

    def __exit__(self, *error: object):
        with contextlib.suppress(RuntimeError):
            self.listen()
        self.kill(self.pids)
        self._process.kill()
        self._process.wait(10)
        self._process.stdin.close()
        self._process.stdout.close()
        self._folder.cleanup()


class Job:
    """Workers of one job."""

    def __init__(self, nursery: Nursery, numbers: Sequence[int]):
        self._nursery = nursery
        self._numbers = numbers
        self._began = time.monotonic()

    def join(self, seconds: float, but: Sequence[int] = ()) -> list[Ended]:
        """Waits for all, except those that cannot end by themselves; kills what has not ended."""
        deadline = time.monotonic() + seconds
        waited = {number for rank, number in enumerate(self._numbers) if rank not in but}
        self._nursery.listen()
        while waited - self._nursery.ended.keys() and time.monotonic() < deadline:
            time.sleep(0.02)
            self._nursery.listen()
        ended = [self._worker(rank, number) for rank, number in enumerate(self._numbers)]
        self._nursery.kill(self._numbers)
        return ended

    def _worker(self, rank: int, number: int) -> Ended:
        code, at = self._nursery.ended.get(number, (None, time.monotonic()))
        log = self._nursery.logs[number]
        output = log.read_text("utf-8", "replace") if log.exists() else ""
        return Ended(rank, code, at - self._began, output)


def imported(backend: str):
    """Imports what workers of a backend import, and starts nothing."""
    from tests.conformance.worker import prepare

    prepare(backend)

    import kerasdist as kd
    from kerasdist.backends import registry

    registry.current()  # what workers import only when they need it
    kd.MultiWorkerMirroredStrategy, kd.callbacks.BackupAndRestore  # noqa: B018


_open = contextlib.ExitStack()
atexit.register(_open.close)


@functools.cache
def nursery(backend: str) -> Nursery:
    """The process of a backend whose forks are the workers of all tests that can have it so."""
    return _open.enter_context(Nursery("-m", "tests.multiprocess.forks", backend))


def main():
    imported(sys.argv[1])
    wait_to_be_one()
    code = sys.argv.pop(1)
    if code.endswith(".py"):
        runpy.run_path(code, run_name="__main__")
    else:
        runpy.run_module(code, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
