"""`MirroredStrategy(launcher="processes")` in a user's script, on PyTorch."""

import json
import sys

import numpy as np

from tests.multiprocess.launching import ended

SECONDS = 300


def test_a_script_trains_in_processes_that_it_starts_itself():
    """Numbers of one device, in every strategy of the script, and the script's exit code."""
    command = [sys.executable, "-m", "tests.multiprocess.mirrored_script", "a b", "--lr"]
    done = ended(command, seconds=SECONDS, KERAS_BACKEND="torch")
    assert done.returncode == 3, done.stdout + done.stderr
    told = [json.loads(line.removeprefix("[worker 1/2] ")) for line in done.stdout.splitlines()]
    assert [line.startswith("[worker 1/2] ") for line in done.stdout.splitlines()].count(True) == 1
    assert sorted(one["rank"] for one in told) == [0, 1]
    for one in told:
        assert (one["devices"], one["replicas"]) == (["cpu:0"], 2)
        assert one["arguments"] == ["a b", "--lr"]
        *runs, plain = one["runs"]
        assert len(runs) == 3
        for run in runs:
            for found, expected in zip(run, plain, strict=True):
                np.testing.assert_allclose(found, expected, rtol=1e-5)
