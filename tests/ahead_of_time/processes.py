"""Starts a process that has XLA's compilers for accelerators on its path."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
WHEELS = Path(sys.prefix) / "ahead-of-time"


def run_with_compilers(
    command: Sequence[str], folder: Path = ROOT, seconds: int = 250, **variables: str
) -> str:
    """Runs a module with arguments; returns what it prints.

    Args:
        command: The module, and its arguments.
        folder: Where to run it.
        seconds: A limit.
        variables: What is added to the environment.
    """
    without_cache = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    path = os.pathsep.join([str(ROOT), str(WHEELS)])
    child = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env={**without_cache, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    return child.stdout
