"""``kerasdist test``, and how a check runs as a job of several workers."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, final

from kerasdist.checks import findings
from kerasdist.checks.findings import Finding
from kerasdist.cluster import cloud_tpu
from kerasdist.core import gpus
from kerasdist.core.backend_choice import KNOWN, VARIABLE, is_installed
from kerasdist.errors import BackendError
from kerasdist.job.launcher import told
from kerasdist.launch.job import Launcher
from kerasdist.launch.spec import JobSpec, python_command
from kerasdist.launch.start import log_file

_WORKER = "kerasdist.checks.cluster_test_worker"

# GPUs round products of float32 to TF32 by default, which is no error of kerasdist.
_FULL_FLOAT32 = {
    "NVIDIA_TF32_OVERRIDE": "0",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
_ON_CPU = {gpus.CUDA: "-1", "JAX_PLATFORMS": "cpu"}


@final
@dataclass(frozen=True)
class Place:
    """Where workers run.

    Attributes:
        workers: How many; None: as `kerasdist run` has it, but two where there is no accelerator.
        hosts: As in `JobSpec`.
        devices_per_worker: How many CPU devices each has; None: its accelerators.
        seconds: After how long a job is ended.
    """

    workers: int | Literal["gpu"] | None = None
    hosts: Sequence[str] = ()
    devices_per_worker: int | None = None
    seconds: float = 600.0

    def spec(self, command: Sequence[str], environment: Mapping[str, str]) -> JobSpec:
        """Returns the specification of a job that runs the command here."""
        workers = self.workers
        if workers is None and not self.hosts and not has_accelerator():
            workers = 2
        return JobSpec(
            command,
            workers=workers,
            hosts=self.hosts,
            devices_per_worker=self.devices_per_worker,
            environment={**(_ON_CPU if self.is_on_cpu else {}), **environment},
        )

    @property
    def is_on_cpu(self) -> bool:
        """Whether workers compute on CPU devices, as far as this machine can tell."""
        return self.devices_per_worker is not None or not (self.hosts or has_accelerator())


def has_accelerator() -> bool:
    """Returns whether this machine has a GPU that a process sees, or a TPU."""
    return bool(gpus.visible()) or cloud_tpu.has_tpus()


def backends(wanted: Sequence[str]) -> tuple[str, ...]:
    """Returns the backends to check: the wanted ones, or all that are installed here.

    Raises:
        BackendError: If a name is none of a backend's, or there is no backend.
    """
    for name in wanted:
        if name not in KNOWN:
            raise BackendError(
                f"Expected backends among {list(KNOWN)}. Received: --backend {name}. "
                "Name one of them."
            )
    found = tuple(wanted) or tuple(filter(is_installed, KNOWN))
    if not found:
        raise BackendError(
            f"Expected one of {list(KNOWN)} to be installed. Received: none of them. Install one: "
            "pip install 'kerasdist[jax]'."
        )
    return found


@final
@dataclass(frozen=True)
class Ran:
    """A job that has ended.

    Attributes:
        results: What the chief has told, in order; empty if the job has failed.
        failure: Why it has failed; None if it has not.
        logs: The folder with what the workers printed, if the job has failed.
    """

    results: Sequence[Any] = ()
    failure: str | None = None
    logs: Path | None = None


def run(
    spec: JobSpec, backend: str, seconds: float, without: str = "the chief has told no result"
) -> Ran:
    """Runs a job whose chief tells results by `kerasdist.job.launcher.tell`.

    Args:
        spec: The job.
        backend: Keras's backend.
        seconds: After how long the job is ended.
        without: The failure of a job that ended well and told nothing.
    """
    folder = Path(tempfile.mkdtemp(prefix="kerasdist-check-"))
    environment = {VARIABLE: backend, **spec.environment}
    launcher = Launcher(replace(spec, logs=folder, environment=environment))
    limit, began = threading.Timer(seconds, launcher.stop), time.monotonic()
    limit.daemon = True
    limit.start()
    try:
        attempt = launcher.run().attempts[-1]
    finally:
        limit.cancel()
    if attempt.signal is not None and time.monotonic() - began >= seconds:
        return Ran(failure=f"it was ended after {seconds:g} s", logs=folder)
    if attempt.signal is not None:
        shutil.rmtree(folder)
        raise KeyboardInterrupt
    if attempt.cause is not None:
        last = next((line for line in reversed(attempt.cause.last_lines) if line.strip()), "")
        why = f"worker {attempt.cause.rank}/{len(attempt.endings)}: {attempt.cause.reason}; {last}"
        return Ran(failure=why, logs=folder)
    file = log_file(folder, 0, 0)
    results = told(file.read_text(encoding="utf-8", errors="replace").splitlines())
    if not results:
        return Ran(failure=without, logs=folder)
    shutil.rmtree(folder)
    return Ran(results)


def test(names: Sequence[str], place: Place, *, as_json: bool) -> bool:
    """Tests backends one after another, and prints what it finds. Returns whether all is well.

    Raises:
        KerasdistError: If a backend or a host is unknown.
    """
    found: dict[str, list[Finding]] = {}
    for backend in backends(names):
        began = time.monotonic()
        spec = place.spec(python_command(_WORKER, module=True), _FULL_FLOAT32)
        ran = run(spec, backend, place.seconds)
        if ran.failure is None:
            found[backend] = findings.of_dicts(ran.results[0], "")
        else:
            said = f"No job would run here. The workers' whole output is in {ran.logs}."
            found[backend] = [Finding("job", "problem", ran.failure, said)]
        if not as_json:
            findings.show(f"{backend}, {time.monotonic() - began:.0f} s", found[backend])
    if as_json:
        listed = {backend: findings.as_dicts(each) for backend, each in found.items()}
        sys.stdout.write(json.dumps(listed, indent=2) + "\n")
    return not any(map(findings.is_failed, found.values()))
