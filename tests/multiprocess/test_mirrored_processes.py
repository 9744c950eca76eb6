"""`MirroredStrategy(launcher="processes")` in a user's script, on PyTorch."""

import json
import sys

import numpy as np

from tests.multiprocess.launching import ended

SECONDS = 300


def by_hand(examples=11, batch=4, epochs=2, rate=0.01):
    """The weights and losses of `mirrored_script.trained`, on one device."""
    x = np.arange(3 * examples, dtype="float32").reshape(examples, 3) / 10
    y, weights, losses = x.sum(1) - 1, np.ones(3), []
    for _ in range(epochs):
        total = 0.0
        for start in range(0, examples, batch):
            rows, wanted = x[start : start + batch], y[start : start + batch]
            error = rows @ weights - wanted
            total += np.sum(error**2)
            weights = weights - rate * 2 * rows.T @ error / len(rows)
        losses.append(total / examples)
    return weights, losses


def test_a_script_trains_in_processes_that_it_starts_itself():
    """Numbers of one device, in every strategy of the script, and the script's exit code."""
    command = [sys.executable, "-m", "tests.multiprocess.mirrored_script", "a b", "--lr"]
    done = ended(command, seconds=SECONDS, KERAS_BACKEND="torch")
    assert done.returncode == 3, done.stdout + done.stderr
    told = [json.loads(line.removeprefix("[worker 1/2] ")) for line in done.stdout.splitlines()]
    assert [line.startswith("[worker 1/2] ") for line in done.stdout.splitlines()].count(True) == 1
    assert sorted(one["rank"] for one in told) == [0, 1]
    weights, losses = by_hand()
    for one in told:
        assert (one["devices"], one["replicas"]) == (["cpu:0"], 2)
        assert one["arguments"] == ["a b", "--lr"]
        for run in one["runs"]:
            np.testing.assert_allclose(run[0], weights, rtol=1e-5)
            np.testing.assert_allclose(run[1], losses, rtol=1e-5)
