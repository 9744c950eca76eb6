"""Warm processes: each has imported what workers import, and forks the workers of later restarts.

From the first backup of an elastic job on, each host has one warm process. Only machines that have
joined the job (`joining.py`) have none. A warm process imports the frameworks, but must not open a
GPU or another accelerator; if an import does so, the warm process ends. A supervisor finds the warm
process by the name of a socket (`kerasdist.cli.launch.supervisor.Forked`). If a worker cannot be
forked, its supervisor starts a new process instead.

Environment variables that frameworks read when they are imported must have the same values in the
warm process and in the worker. So a worker is forked only if its environment equals the environment
of the warm process, except for the job's own variables. If a script later sets an environment
variable that the imports have already read, Python is started anew in place of the forked process.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import queue
import runpy
import select
import signal
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import final

from kerasdist.cli.launch.placement import Slot
from kerasdist.cli.launch.spec import JobSpec
from kerasdist.cli.launch.supervisor import Order, follow_into_death, peer_user
from kerasdist.cli.launch.worker import Screen, Start, Worker
from kerasdist.core.backend_choice import backend_choice
from kerasdist.job.launcher import JOINED_FILE

# Variables with these prefixes differ between workers, but no import reads them.
_OF_EACH = ("KERASDIST_", "SSH_")
# The same is true of variables whose names end with this text, such as CUDA_VISIBLE_DEVICES.
_GPUS = "_VISIBLE_DEVICES"
# Libraries read variables with these prefixes when they are imported.
_READ = (
    *(b"KERAS", b"JAX_", b"XLA_", b"TF", b"TORCH", b"PYTORCH_", b"OMP_", b"KMP_", b"GOMP_"),
    *(b"MKL_", b"OPENBLAS_", b"CUDA_", b"NVIDIA_", b"NCCL_", b"GLOO_", b"PYTHON", b"LD_"),
)
_OURS = "kerasdist", "kerasdist.callbacks.backup_and_restore"
_GPU_DRIVERS = "/dev/nvidiactl", "/dev/kfd"
_ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/vfio")
Environment = Mapping[str, str]


@final
class WarmProcesses:
    """Processes that have imported the frameworks, and fork the workers of later restarts.

    Args:
        spec: The description of the job.
        screen: The output of the launcher.
    """

    def __init__(self, spec: JobSpec, screen: Screen) -> None:
        self._spec, self._screen = spec, screen
        self._starts: dict[str | None, Start] = {}
        self._running: dict[str | None, Worker] = {}

    def name(self, slot: Slot) -> str:
        """Returns the name of the socket of a slot's warm process; "" if the slot has none."""
        _, script, *_ = *self._spec.command, ""
        is_script = script == "-m" or script.endswith(".py")
        is_elastic = self._spec.min_workers is not None and slot.connection is None
        is_possible = sys.platform == "linux" and is_elastic and is_script
        return f"kerasdist-{self._spec.run_id}-{slot.host}" if is_possible else ""

    def take(self, slot: Slot, start: Start) -> None:
        """Stores how a worker was started; the host's warm process is started in the same way.

        The worker of rank 0 is the first of an attempt. So with rank 0, everything that earlier
        attempts have stored is removed.
        """
        if slot.rank == 0:
            self._starts = {}
        self._starts[slot.host] = start

    def start(self, frameworks: Sequence[str]) -> None:
        """Starts a warm process, which imports these frameworks, on each host that has none."""
        for host, start in list(self._starts.items()):
            is_there = host in self._running and self._running[host].running
            if is_there or not start.orders["warm"]:
                continue
            orders = start.orders.copy()
            python, *script = self._spec.command
            own = [orders["warm"], ",".join(frameworks)]
            orders["command"] = [python, "-P", "-m", __name__, *own, *script]
            orders["inherited"], orders["warm"], orders["sends_reports"] = [], "", False
            silent = replace(start, orders=orders, log=Path(os.devnull), told=None)
            self._running[host] = Worker(silent, self._screen, queue.SimpleQueue())

    def close(self) -> None:
        """Ends the warm processes."""
        for each in self._running.values():
            each.kill()


def fork_workers(listener: socket.socket, environment: Environment) -> tuple[Order, list[int]]:
    """Forks a worker for each supervisor that connects, until this process is killed.

    Only a forked worker returns from this function, with its order and the open files that it gets.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that ended children do not stay as zombies
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return _fork_and_stay(connection, environment)
        connection.close()


def _fork_and_stay(connection: socket.socket, environment: Environment) -> tuple[Order, list[int]]:
    """Forks a worker. Only the worker returns from this function.

    This process, the worker's parent, waits until the worker ends or the supervisor has gone. Then
    it ends the worker's process group.
    """
    # This process makes a group of its own, because all processes in the warm process's group are
    # killed when the warm process ends.
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if peer_user(connection) != os.getuid():
        os._exit(1)
    files = socket.recv_fds(connection, 1, 16)[1]
    with connection.makefile("rb") as lines:
        order: Order = json.loads(lines.readline())
    if _comparable(order["environment"]) != _comparable(environment):
        os._exit(1)
    worker = os.fork()
    if worker == 0:
        connection.close()
        return order, files
    # This process and the worker both set the worker's group, because either may run first.
    os.setpgid(worker, worker)
    for one in files:
        os.close(one)
    connection.sendall(f"{worker}\n".encode())
    select.select([connection, os.pidfd_open(worker)], [], [])
    os.killpg(worker, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(f"{code}\n".encode())
    os._exit(0)


def _comparable(environment: Environment) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(_OF_EACH) and not name.endswith(_GPUS)
    }


def _become_worker(order: Order, files: Sequence[int], before: Environment) -> None:
    """Gives a forked process the environment, group and files of a worker.

    `before` is the environment before the imports. Only variables that differ between `before` and
    the worker's environment are changed, so what an import has set stays set.
    """
    os.setpgid(0, 0)
    follow_into_death()
    own = order["environment"].items()
    os.environ.update({name: value for name, value in own if before.get(name) != value})
    for name in before.keys() - order["environment"].keys():
        os.environ.pop(name, None)
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), *files[:2])):
        os.dup2(file, number)
        os.close(file)
    for name, file in zip(order["files"], files[2:], strict=True):
        os.set_inheritable(file, True)
        os.environ[name] = str(file)
    if "numpy" in sys.modules:  # after a fork, Python seeds its own generator anew; NumPy does not
        sys.modules["numpy"].random.seed()


def _start_anew_if_set(command: list[str], imported: Collection[str]) -> None:
    """Starts Python anew once the script sets an environment variable that imports have read."""

    def look(event: str, arguments: tuple[bytes, ...]) -> None:
        if event not in ("os.putenv", "os.unsetenv") or not arguments[0].startswith(_READ):
            return
        if Path(os.environ[JOINED_FILE]).exists() or (
            event == "os.putenv" and os.environb.get(arguments[0]) == arguments[1]
        ):
            return
        frame = inspect.currentframe()
        frame = None if frame is None else frame.f_back
        while frame is not None and _package(frame) in sys.stdlib_module_names:
            frame = frame.f_back
        # Python starts anew only if the script itself sets the environment variable. If a framework
        # sets it after its import, a process that was not forked would do the same.
        if frame is not None and _package(frame) not in imported:
            os.execv(command[0], command)

    sys.addaudithook(look)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def main() -> None:
    """Imports the frameworks, waits for orders, and runs the script in each forked process."""
    name, frameworks, *script = sys.argv[1:]
    environment = dict(os.environ)
    is_module = script[0] == "-m"
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, str(Path.cwd()) if is_module else str(Path(script[0]).resolve().parent))
    backend, loaded = backend_choice().name, frameworks.split(",")
    if backend not in loaded:
        return  # the script chooses another backend, so its workers could not use this process
    modules = "keras", *_OURS, f"kerasdist.backends.{backend}.backend"
    if backend == "torch" and any(Path(each).exists() for each in _GPU_DRIVERS):
        modules = ()  # on PyTorch, an import of Keras would open the GPUs
    for each in (*modules, *loaded):
        importlib.import_module(each)
    opened = [str(file.resolve()) for file in Path("/proc/self/fd").iterdir()]
    if any(file.startswith(_ACCELERATORS) for file in opened):
        return  # an import opened an accelerator, which a fork could not use
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        _become_worker(*fork_workers(listener, environment), environment)
    imported = {"keras", *(each.partition(".")[0] for each in sys.modules)} - {"__main__"}
    _start_anew_if_set([sys.executable, *script], imported)
    sys.orig_argv = [sys.executable, *script]
    sys.argv = script[1:] if is_module else script
    if is_module:
        runpy.run_module(script[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script[0], run_name="__main__")


if __name__ == "__main__":
    main()
