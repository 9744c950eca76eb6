"""`make gpu`: the suites and `benchmarks/gpu_smoke.py`, of each backend that sees a GPU here.

The suites' cases run on one replica, on the first GPU, against plain Keras on it; cases about
several replicas need several devices. A backend that sees no GPU is left out, and a line says so.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conformance.registry import BACKENDS, SUITES_ON

ROOT = Path(__file__).parents[2]
SUITES = ("tests.conformance.runner", "tests.facade")
SMOKE = "benchmarks/gpu_smoke.py"


def finds_gpu(backend: str) -> bool:
    """Whether a backend sees a GPU of this machine; prints the line that says so."""
    command = [sys.executable, SMOKE, "--backends", backend, "--parts", "device"]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    line = json.loads(ended.stdout)
    print(f"{backend}: {line.get('skipped') or line}", flush=True)
    return "skipped" not in line


def run(backend: str) -> bool:
    """Whether the suites and the smoke test of a backend are good."""
    environment = os.environ | {SUITES_ON: "gpu:1"}
    suites = [
        subprocess.run(
            [sys.executable, "-m", suite, backend], cwd=ROOT, env=environment, check=False
        )
        for suite in SUITES
    ]
    smoke = subprocess.run([sys.executable, SMOKE, "--backends", backend], cwd=ROOT, check=False)
    return not any(ended.returncode for ended in (*suites, smoke))


def main() -> int:
    seen = [backend for backend in BACKENDS if finds_gpu(backend)]
    if not seen:
        print("No backend sees a GPU on this machine: nothing was run.")
        return 0
    failed = [backend for backend in seen if not run(backend)]
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
