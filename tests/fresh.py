"""Runs Python in a fresh interpreter: a framework fixes its devices, and Keras its framework.

What is imported there is what the code imports.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.environment import QUIET, values

ROOT = Path(__file__).parents[1]
SECONDS = 900


def run_fresh(code: str, *, seconds: float = SECONDS, **environment: str) -> str:
    """Return what `code` prints; fail with its whole output if it fails."""
    return run_python("-c", code, seconds=seconds, **environment)


def run_python(*arguments: str | Path, seconds: float = SECONDS, **environment: str) -> str:
    """Return what ``python *arguments`` prints; fail with its whole output if it fails."""
    child = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **values(QUIET), **environment},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert child.returncode == 0, f"exit status {child.returncode}\n{child.stdout}{child.stderr}"
    return child.stdout
