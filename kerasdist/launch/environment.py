"""The variables that a worker gets."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

from kerasdist.cluster import own
from kerasdist.config import CPU_DEVICES_VARIABLE
from kerasdist.job.secret import JOB_ID, SECRET, SECRET_FILE
from kerasdist.launch.placement import Seat
from kerasdist.launch.spec import JobSpec

# What configures the frameworks and is not of one machine. Another machine has its own PATH, HOME
# and CUDA_VISIBLE_DEVICES.
_PREFIXES = ("KERAS_", "KERASDIST_", "TF_", "XLA_", "JAX_", "TORCH_", "NCCL_", "GLOO_", "OMP_")
_NAMES = ("PYTHONPATH", "PYTHONHASHSEED")


def of_job(spec: JobSpec, attempt: int) -> dict[str, str]:
    """Returns the job's name and secret: one for every start, unless the user set a secret."""
    variables = {JOB_ID: f"{secrets.token_hex(8)}-{attempt}"}
    given = {**os.environ, **spec.environment}
    if not given.get(SECRET) and not given.get(SECRET_FILE):
        variables[SECRET] = secrets.token_hex(32)
    return variables


def of_worker(
    spec: JobSpec, seat: Seat, workers: int, coordinator: str, attempt: int
) -> dict[str, str]:
    """Returns what a worker's environment has beyond the launcher's own.

    Args:
        spec: The job.
        seat: The worker's place.
        workers: How many there are.
        coordinator: Where they meet.
        attempt: How often the job has been started before.
    """
    variables = {
        "PYTHONUNBUFFERED": "1",  # what a worker has said is to be seen when it is killed
        **spec.environment,
        own.WORKERS: str(workers),
        own.RANK: str(seat.rank),
        own.COORDINATOR: coordinator,
        own.LOCAL_RANK: str(seat.local_rank),
        own.LOCAL_WORKERS: str(seat.local_workers),
        own.RESTART: str(attempt),
    }
    if spec.devices_per_worker is not None:
        variables[CPU_DEVICES_VARIABLE] = str(spec.devices_per_worker)
    return variables


def for_another_machine(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns those of this process's variables that a worker on another machine gets.

    Args:
        environ: This process's variables.
    """
    return {
        name: value
        for name, value in environ.items()
        # TF_CONFIG describes another cluster than the one that is started here.
        if (name.startswith(_PREFIXES) or name in _NAMES) and name not in ("TF_CONFIG", SECRET)
    }
