"""``kerasdist test``, and functions that run a check as a job of several workers."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kerasdist.cli.diagnostics import findings
from kerasdist.cli.diagnostics.findings import Finding
from kerasdist.cli.formatting import plain_console
from kerasdist.cli.launch.job import Launcher
from kerasdist.cli.launch.spec import JobSpec, python_command
from kerasdist.cli.launch.start import log_file
from kerasdist.cli.options import AsJson, Devices, Hosts, Seconds, listed, number_of_workers, option
from kerasdist.cluster import cloud_tpu
from kerasdist.core import gpus
from kerasdist.core.backend_choice import KNOWN, VARIABLE, backend_choice, is_installed
from kerasdist.errors import BackendError, JobError
from kerasdist.job import launcher

_WORKER = "kerasdist.cli.diagnostics.cluster_test_worker"

# Environment variables of the workers of `kerasdist test`. By default GPUs multiply float32
# matrices in TF32, and the test would report the rounding of TF32 as wrong weights.
_FULL_FLOAT32 = {
    "NVIDIA_TF32_OVERRIDE": "0",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def has_accelerator() -> bool:
    """Returns whether this machine has a TPU, or a GPU that is visible to this process."""
    return bool(gpus.visible()) or cloud_tpu.has_tpus()


def cpu_variables(hosts: str | None, devices_per_worker: int | None = None) -> dict[str, str]:
    """Returns environment variables that make the workers of a job compute on CPUs.

    The result is empty if the job may use accelerators: those of this machine, or of `hosts`. It is
    never empty if `devices_per_worker` is given, because that is a number of CPU devices.
    """
    if devices_per_worker is None and (hosts or has_accelerator()):
        return {}
    return {gpus.CUDA: "-1", "JAX_PLATFORMS": "cpu"}


def require_backend(name: str) -> None:
    """Raises a `BackendError` if the backend of this name does not exist or cannot be used."""
    problem = backend_choice({**os.environ, VARIABLE: name}).problem
    if problem is not None:
        raise BackendError(problem)


def run(
    spec: JobSpec, backend: str, seconds: float, without: str = "the chief has printed no result"
) -> list[Any]:
    """Runs a job whose chief prints results by `kerasdist.job.launcher.print_result`.

    Args:
        spec: The description of the job.
        backend: The backend for Keras.
        seconds: The time after which the job is ended.
        without: The failure to report if the job succeeded but printed no result.

    Returns:
        The results, in the order in which they were printed.

    Raises:
        JobError: If the job fails.
    """
    folder = Path(tempfile.mkdtemp(prefix="kerasdist-check-"))
    environment = {VARIABLE: backend, **spec.environment}
    job = Launcher(replace(spec, logs=folder, environment=environment))
    limit, began = threading.Timer(seconds, job.stop), time.monotonic()
    limit.daemon = True
    limit.start()
    try:
        attempt = job.run().attempts[-1]
    finally:
        limit.cancel()
    if attempt.signal is not None and time.monotonic() - began >= seconds:
        why = f"it was ended after {seconds:g} s"
    elif attempt.signal is not None:
        shutil.rmtree(folder)
        raise KeyboardInterrupt
    elif attempt.cause is not None:
        last = next((line for line in reversed(attempt.cause.last_lines) if line.strip()), "")
        why = f"worker {attempt.cause.rank}/{len(attempt.endings)}: {attempt.cause.reason}; {last}"
    else:
        lines = log_file(folder, 0, 0).read_text(encoding="utf-8", errors="replace").splitlines()
        if results := launcher.read_results(lines):
            shutil.rmtree(folder)
            return results
        why = without
    raise JobError(f"{why}; the workers' output is in {folder}")


def compare(
    *,
    backend: Annotated[
        list[str] | None,
        option(
            "NAME",
            "tensorflow, jax or torch; may be given several times (default: all installed).",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        str | None,
        option(
            "N|gpu",
            "Number of workers (default: as kerasdist run; 2 on a machine without accelerators).",
            "--workers",
            "-n",
        ),
    ] = None,
    hosts: Hosts = None,
    devices_per_worker: Devices = None,
    timeout: Seconds = 300.0,
    as_json: AsJson = False,
) -> None:
    """Train for some seconds, and compare the weights with training on one device.

    For each backend, a job on this machine, or on --hosts, checks sums, gathers and broadcasts,
    measures the bandwidth, and trains 20 steps. The exit code is 1 if something is wrong.
    """
    count = number_of_workers(workers)
    if count is None and not hosts and not has_accelerator():
        count = 2
    spec = JobSpec(
        python_command(_WORKER, module=True),
        workers=count,
        hosts=listed(hosts),
        devices_per_worker=devices_per_worker,
        environment={**cpu_variables(hosts, devices_per_worker), **_FULL_FLOAT32},
    )
    found: dict[str, list[Finding]] = {}
    names = backend or [*filter(is_installed, KNOWN)] or [backend_choice().name]
    for name in names:
        require_backend(name)
    for name in names:
        began = time.monotonic()
        try:
            found[name] = findings.of_dicts(run(spec, name, timeout)[0], "")
        except JobError as error:
            found[name] = [Finding("job", "problem", str(error), "No job would run here.")]
        if not as_json:
            title = f"{name}, {time.monotonic() - began:.0f} s"
            findings.show(title, found[name], plain_console())
    if as_json:
        told = {name: findings.as_dicts(each) for name, each in found.items()}
        typer.echo(json.dumps(told, indent=2))
    raise typer.Exit(any(map(findings.is_failed, found.values())))
