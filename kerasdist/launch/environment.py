"""The environment variables of a worker."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

from kerasdist.cluster import kerasdist_variables
from kerasdist.config import CPU_DEVICES_VARIABLE
from kerasdist.core import gpus
from kerasdist.job.secret import JOB_ID, SECRET, SECRET_FILE
from kerasdist.launch import supervisor
from kerasdist.launch.placement import Slot
from kerasdist.launch.spec import JobSpec

# Variables that configure the frameworks on any machine. Another machine has its own PATH, HOME
# and CUDA_VISIBLE_DEVICES. TF_ is Terraform's as well, whose TF_VAR_ and TF_TOKEN_ are secret.
_PREFIXES = (
    *("KERAS_", "KERASDIST_", "XLA_", "JAX_", "TORCH_", "NCCL_", "GLOO_", "OMP_"),
    *("TF_CPP_", "TF_CUDNN_", "TF_DETERMINISTIC_", "TF_DISABLE_", "TF_ENABLE_", "TF_FORCE_"),
    *("TF_GPU_", "TF_NUM_", "TF_USE_", "TF_XLA_"),
)
_NAMES = ("PYTHONPATH", "PYTHONHASHSEED")
_THREADS = "OMP_NUM_THREADS"


def of_job(spec: JobSpec, attempt: int) -> dict[str, str]:
    """Returns the job's name and secret, new for every start unless the user set a secret."""
    variables = {JOB_ID: f"{spec.run_id}-{attempt}"}
    given = {**os.environ, **spec.environment}
    if not given.get(SECRET) and not given.get(SECRET_FILE):
        variables[SECRET] = secrets.token_hex(32)
    return variables


def of_worker(
    spec: JobSpec, slot: Slot, workers: int, coordinator: str, attempt: int
) -> dict[str, str]:
    """Returns a worker's variables beyond the launcher's own."""
    variables = {
        "PYTHONUNBUFFERED": "1",  # else lines are lost when a worker is killed
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


def of_threads(workers: int) -> dict[str, str]:
    """Returns the variable that gives each of this machine's workers its part of the cores."""
    threads = os.environ.get(_THREADS) or str(max(1, supervisor.cores() // workers))
    return {_THREADS: threads}


def of_gpus(environ: Mapping[str, str], workers: int) -> list[dict[str, str]]:
    """Returns, for each worker of this machine, the variables that show it its part of the GPUs.

    So what a script does before it makes a strategy touches no other worker's GPU. Nothing is
    changed where there are too few, which the strategy reports.

    Args:
        environ: The variables that the workers have otherwise.
        workers: How many workers this machine has.
    """
    if workers < 2:
        return [{} for _ in range(workers)]
    variable, names = offered_gpus(environ)
    given = {} if environ.get(variable) else {gpus.ORDER: environ.get(gpus.ORDER, "PCI_BUS_ID")}
    parts = [gpus.part(len(names), workers, number) for number in range(workers)]
    return [
        {**given, variable: ",".join(names[index] for index in own)} if own else {} for own in parts
    ]


def offered_gpus(environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """Returns the variable that chooses among this machine's GPUs, and their names there."""
    seen = gpus.visible(environ)
    is_hip = bool(seen) and seen[0].maker == "AMD" and not environ.get(gpus.CUDA)
    variable = gpus.HIP if is_hip else gpus.CUDA
    chosen = environ.get(variable)
    if chosen is None:
        return variable, [str(index) for index in range(len(seen))]
    return variable, [name for name in chosen.split(",") if name]


def for_another_machine(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns those of this process's variables that a worker on another machine gets."""
    return {
        name: value
        for name, value in environ.items()
        if (name.startswith(_PREFIXES) or name in _NAMES) and name != SECRET
    }
