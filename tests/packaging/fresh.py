"""Runs code in a fresh interpreter: what is imported there is what the code imports."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 100


def run_fresh(code: str, **environment: str) -> str:
    """Return what `code` prints; fail with its whole output if it fails."""
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert child.returncode == 0, f"exit status {child.returncode}\n{child.stdout}{child.stderr}"
    return child.stdout
