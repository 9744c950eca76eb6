"""``kerasdist run`` of a real job: who has failed is named, not who ends because of that."""

import os
import re

import pytest

from kerasdist.job.monitor import GRACE_SECONDS
from tests.multiprocess.forks import report
from tests.multiprocess.launching import beside, finish

# How one fails, and for how many seconds it is kept from its end, so that the other one ends first.
JOBS = {
    ("chief_exits_with_3", 4): (0, 3, "exit code 3"),
    ("exit_with_3", 60): (1, 1, "exit code 1"),
    ("raise_an_error", 4): (1, 1, "KeyError: .*a mistake"),
    ("chief_raises_an_error", 60): (0, 1, "KeyError: .*a mistake"),
    ("be_killed", 0): (1, 137, "ended by SIGKILL"),
}
SLACK = 30.0  # for processes to start and to stop


@pytest.fixture(scope="module")
def launchers():
    """All jobs of this file, begun together, since most of their time is waiting."""
    run = ("-m", "kerasdist", "run", "--workers", "2", "-m", "tests.multiprocess.job_script")
    return {job: beside(*run, *map(str, job), seconds=SLACK + GRACE_SECONDS) for job in JOBS}


@pytest.mark.parametrize("job", JOBS)
def test_the_worker_that_failed_is_named(launchers, job):
    ended, (rank, code, said) = launchers[job].result(), JOBS[job]
    assert ended.code == code, report([ended])
    assert re.findall(r"worker (\d)/2 failed after", ended.output) == [str(rank)], report([ended])
    assert re.search(said, ended.output), report([ended])


_FIT = """
import os, sys

import keras
import numpy as np

if "plain" in sys.argv:
    model = keras.Sequential([keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
else:
    import kerasdist as kd

    with kd.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
model.compile(keras.optimizers.Adam(schedule), keras.losses.Huber(), metrics=["mae"])
x = np.ones((8, 4), "float32")
model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[keras.callbacks.EarlyStopping("loss")])
print("imported" if "tensorflow" in sys.modules else "left out", "core", *os.sched_getaffinity(0))
"""


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_job_imports_no_tensorflow_that_keras_does_not_and_keeps_to_its_cores(tmp_path, backend):
    script = tmp_path / "script.py"
    script.write_text(_FIT, encoding="utf-8")
    done = finish("run", "--workers", 2, script, KERAS_BACKEND=backend, CUDA_VISIBLE_DEVICES="-1")
    assert done.returncode == 0, done.stderr
    if done.stdout.count("left out") != 2:
        plain = finish("run", "--workers", 1, script, "plain", KERAS_BACKEND=backend)
        assert "imported" in plain.stdout, done.stdout + done.stderr
    shared = set.intersection(*map(set, map(str.split, re.findall("core (.+)", done.stdout))))
    assert bool(shared) == (backend == "jax" or len(os.sched_getaffinity(0)) % 2 == 1)
