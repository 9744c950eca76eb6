"""What the command ``kerasdist test`` does."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

from kerasdist.checks import findings, jobs
from kerasdist.checks.findings import Finding
from kerasdist.launch.spec import python_command

_WORKER = "kerasdist.checks.cluster_test_worker"

# GPUs round products of float32 to TF32 by default, which is no error of kerasdist.
_FULL_FLOAT32 = {
    "NVIDIA_TF32_OVERRIDE": "0",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def run(backends: Sequence[str], place: jobs.Place, *, as_json: bool) -> bool:
    """Tests backends one after another, and prints what it finds. Returns whether all is well.

    Raises:
        KerasdistError: If a backend or a host is unknown.
    """
    found: dict[str, list[Finding]] = {}
    for backend in jobs.backends(backends):
        found[backend] = _of_backend(backend, place, as_json=as_json)
    if as_json:
        listed = {backend: findings.as_dicts(each) for backend, each in found.items()}
        sys.stdout.write(json.dumps(listed, indent=2) + "\n")
    return not any(map(findings.is_failed, found.values()))


def _of_backend(backend: str, place: jobs.Place, *, as_json: bool) -> list[Finding]:
    began = time.monotonic()
    spec = place.spec(python_command(_WORKER, module=True), _FULL_FLOAT32)
    ran = jobs.run(spec, backend, place.seconds)
    if ran.failure is None:
        [told] = ran.results
        found = findings.of_dicts(told, "")
    else:
        said = f"No job would run here. The workers' whole output is in {ran.logs}."
        found = [Finding("job", "problem", ran.failure, said)]
    if not as_json:
        findings.show(f"{backend}, {time.monotonic() - began:.0f} s", found)
    return found
