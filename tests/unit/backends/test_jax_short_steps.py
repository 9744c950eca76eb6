"""Short steps on several CPU devices of JAX come to an end: see kerasdist/backends/jax/flow.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(180)
def test_short_steps_on_four_devices_finish():
    # The process that stalls aborts after 40 seconds, so this can't hang.
    script = [sys.executable, "benchmarks/short_steps.py", "--here"]
    finished = subprocess.run(
        [*script, "--steps", "2000", "--devices", "4"],
        cwd=ROOT,
        env=os.environ | {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    assert "2000 steps" in finished.stdout
