"""Starts the workers of an attempt: their variables and commands, on this machine and by ssh."""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kerasdist.cli.launch import supervisor
from kerasdist.cli.launch.placement import Slot, open_coordinator
from kerasdist.cli.launch.spec import JobSpec
from kerasdist.cli.launch.supervisor import Orders
from kerasdist.cli.launch.worker import Events, Screen, Start, Worker
from kerasdist.cluster import kerasdist_variables
from kerasdist.config import CPU_DEVICES_VARIABLE
from kerasdist.core import gpus
from kerasdist.job.handshake import JOB_ID, SECRET, SECRET_FILE
from kerasdist.job.launcher import MEMORY
from kerasdist.job.listening import COORDINATOR_FD
from kerasdist.job.protocol import Timeouts

# A worker on another machine gets those variables of this process whose names begin with one of
# these prefixes or are in `_NAMES`. These variables mean the same on every machine, unlike PATH or
# CUDA_VISIBLE_DEVICES.
# The prefix TF_ alone would include Terraform's secret variables, TF_VAR_ and TF_TOKEN_.
_PREFIXES = (
    *("KERAS_", "KERASDIST_", "XLA_", "JAX_", "TORCH_", "NCCL_", "GLOO_", "OMP_"),
    *("TF_CPP_", "TF_CUDNN_", "TF_DETERMINISTIC_", "TF_DISABLE_", "TF_ENABLE_", "TF_FORCE_"),
    *("TF_GPU_", "TF_NUM_", "TF_USE_", "TF_XLA_"),
)
_NAMES = ("PYTHONPATH", "PYTHONHASHSEED")
_THREADS = "OMP_NUM_THREADS"
_AT_ONCE = 64


def job_variables(spec: JobSpec, attempt: int) -> dict[str, str]:
    """Returns variables with an attempt's job id and, if the user set no secret, a new secret."""
    variables = {JOB_ID: f"{spec.run_id}-{attempt}"}
    if not spec.variables.get(SECRET) and not spec.variables.get(SECRET_FILE):
        variables[SECRET] = secrets.token_hex(32)
    return variables


def worker_variables(
    spec: JobSpec, slot: Slot, workers: int, coordinator: str, attempt: int
) -> dict[str, str]:
    """Returns the environment variables that the launcher sets for a worker."""
    variables = {
        "PYTHONUNBUFFERED": "1",  # without this, lines are lost when a worker is killed
        **spec.environment,
        kerasdist_variables.WORKERS: str(workers),
        kerasdist_variables.RANK: str(slot.rank),
        kerasdist_variables.COORDINATOR: coordinator,
        kerasdist_variables.LOCAL_RANK: str(slot.local_rank),
        kerasdist_variables.LOCAL_WORKERS: str(slot.local_workers),
        kerasdist_variables.RESTART: str(attempt),
    }
    if spec.profile is not None:
        variables |= spec.profile.variables
    if spec.devices_per_worker is not None:
        variables[CPU_DEVICES_VARIABLE] = str(spec.devices_per_worker)
    return variables


def thread_variables(workers: int) -> dict[str, str]:
    """Returns ``OMP_NUM_THREADS``: the user's value, or the number of cores per worker here."""
    threads = os.environ.get(_THREADS) or str(max(1, supervisor.cores() // workers))
    return {_THREADS: threads}


def for_another_machine(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of this process that a worker on another machine gets."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_PREFIXES) or name in _NAMES
    }


# With BatchMode ssh fails instead of waiting for a password forever.
# The ServerAlive options end a connection that has been silent for half a minute.
_SSH = (
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20"),
    *("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"),
)


# Python runs the supervisor by its path, isolated (-I) and without site packages (-S), because the
# supervisor then starts in 20 ms.
SUPERVISOR_HERE = (sys.executable, "-I", "-S", supervisor.__file__)


def by_ssh(host: str, words: Sequence[str], path: str | None) -> list[str]:
    """Returns an ssh command that runs `words` on a host, in the folder of this process."""
    before = [] if path is None else ["env", f"PYTHONPATH={path}"]
    folder = shlex.quote(str(Path.cwd()))
    return [*_SSH, "--", host, f"cd {folder} && exec {shlex.join([*before, *words])}"]


def orders_of(spec: JobSpec, slot: Slot, variables: dict[str, str]) -> Orders:
    """Returns the orders for a worker's supervisor."""
    return {
        "command": list(spec.command),
        "variables": variables,
        "seconds_to_stop": spec.stop_seconds,
        "heartbeat": Timeouts.of_environment(spec.variables).heartbeat,
        "local_workers": slot.own_share[1],
        "gpus_of": None,
        "inherited": [],
        "sends_reports": False,
        "must_join": False,
        "warm": "",
    }


def variables_of(
    spec: JobSpec, slots: Sequence[Slot], coordinator: str, attempt: int
) -> Iterator[dict[str, str]]:
    """Yields, for each worker, the variables that the launcher sets."""
    job = job_variables(spec, attempt) | {MEMORY: memory_of(spec)}
    here = next((slot.own_share[1] for slot in slots if slot.host is None), 0)
    of_gpus = gpus.divide(spec.variables, here)
    for slot in slots:
        own = worker_variables(spec, slot, len(slots), coordinator, attempt) | job
        is_here = slot.host is None
        yield thread_variables(here) | own | of_gpus[slot.own_share[0]] if is_here else own


def memory_of(spec: JobSpec) -> str:
    """Returns the folder in which each host keeps copies of the job's backups in memory."""
    return f"/dev/shm/kerasdist-{spec.run_id}"


def run_on(hosts: Collection[str], words: Sequence[str], seconds: float) -> set[str]:
    """Runs a command on other machines; returns the machines on which it succeeded in time."""

    def does(host: str) -> bool:
        try:
            subprocess.run(
                by_ssh(host, words, None),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=seconds,
                check=True,
            )
        except subprocess.SubprocessError:
            return False
        return True

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        done = pool.map(does, hosts := sorted(hosts))
        return {host for host, is_done in zip(hosts, done, strict=True) if is_done}


def supervised(
    spec: JobSpec, slot: Slot, variables: dict[str, str]
) -> tuple[Orders, Sequence[str]]:
    """Returns the orders for a worker's supervisor, and the command that starts the supervisor.

    A host that is reached by ssh must have this machine's interpreter and folders at the same
    paths, as for ``mpirun``.
    """
    orders = orders_of(spec, slot, variables)
    if slot.host is None:
        return orders, SUPERVISOR_HERE
    orders["variables"] = for_another_machine(os.environ) | variables
    orders["gpus_of"] = slot.own_share[0]
    if slot.connection is None:
        # With -P Python does not import a file of the script's folder, such as a signal.py.
        command = (spec.command[0], "-P", "-m", supervisor.__name__)
        return orders, by_ssh(slot.host, command, orders["variables"].get("PYTHONPATH"))
    # The secret is not sent: the machine has it already, and the connection is not encrypted.
    for name in (SECRET, SECRET_FILE):
        orders["variables"].pop(name, None)
    return orders, (*SUPERVISOR_HERE, str(slot.connection.fileno()))


def begin_others(
    spec: JobSpec, slots: Sequence[Slot], screen: Screen, events: Events
) -> Iterator[Worker]:
    """Starts and yields the workers from rank 1 on; this process is rank 0.

    Every worker sees all devices, just as this process does.
    """
    coordinator, listener = open_coordinator(slots)
    assert listener is not None  # rank 0 is on this machine
    count = len(slots)
    of_all = job_variables(spec, 0) | thread_variables(count)
    own, *others = (worker_variables(spec, each, count, coordinator, 0) | of_all for each in slots)
    for slot, variables in zip(slots[1:], others, strict=True):
        orders = orders_of(spec, slot, variables)
        orders["must_join"] = True  # this process waits for the worker to join
        begun = Start(slot.rank, f"worker {slot.rank}/{count}", SUPERVISOR_HERE, orders)
        yield Worker(begun, screen, events)
    os.environ.update(own)
    os.environ[COORDINATOR_FD] = str(listener.detach())


def log_file(folder: Path, attempt: int, rank: int) -> Path:
    """Returns the path of a worker's log file, after making the folder for it."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"attempt-{attempt}-worker-{rank}.log"
