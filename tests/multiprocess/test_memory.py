"""`keep_in_memory=True`: what is lost with a worker, a host and the disk comes from another host.

The runs are equal to the last bit: the number of workers is the same before and after.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.environment import CPU_DEVICES, everything, values
from tests.multiprocess import hosts
from tests.multiprocess.launching import finish

SECONDS = 600
BACKENDS = ("torch", "jax", "tensorflow") if everything() else ("torch",)
SCRIPT = "tests.multiprocess.memory_script"


def run(folder, backend, what, *arguments, **environment):
    folder.mkdir(exist_ok=True)
    environment |= {"KERAS_BACKEND": backend, **values(CPU_DEVICES)}
    call = (*arguments, "-m", SCRIPT, folder, what)
    return finish("run", *call, seconds=SECONDS, **environment)


def require_nothing_in_memory(done):
    folders = set(re.findall(r"memory (/dev/shm/kerasdist-\w+)", done.stdout))
    assert len(folders) == 1, done.stdout + done.stderr
    assert not Path(folders.pop()).exists()


def require_equal(found, expected):
    one, other = np.load(found / "values.npz"), np.load(expected / "values.npz")
    assert one.files == other.files
    for name in one.files:
        assert np.array_equal(one[name], other[name]), name
    one, other = (json.loads((each / "history.json").read_text()) for each in (found, expected))
    assert one == other


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_worker_a_host_and_the_disk_are_lost(tmp_path, backend):
    """The chief is killed; then its host is lost, and one that has no copy takes its place."""
    whole, worker, host = (tmp_path / name for name in ("whole", "worker", "host"))
    done = run(whole, backend, "nothing", "--workers", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    require_nothing_in_memory(done)

    done = run(worker, backend, "worker", "--workers", 2, "--max-restarts", 1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("from (1, 2)") == 2, done.stdout + done.stderr
    require_nothing_in_memory(done)
    require_equal(worker, whole)

    host.mkdir()
    hosts.take_down(host, hosts.NAMES[0])
    listed = ("--hosts", ",".join(hosts.NAMES[:3]))
    done = run(
        *(host, backend, "host", *listed, "--workers", "2:2", "--max-restarts", 1),
        **hosts.make(host),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"attempt 0: rank 0 on {hosts.NAMES[1]}" in done.stdout, done.stdout + done.stderr
    assert f"attempt 1: rank 0 on {hosts.NAMES[0]}" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("from (1, 2)") == 2, done.stdout + done.stderr
    require_nothing_in_memory(done)
    require_equal(host, whole)


def test_a_job_that_fails_leaves_nothing_in_memory(tmp_path):
    done = run(tmp_path, "torch", "all", "--workers", 2)
    assert done.returncode == 128 + 9, done.stdout + done.stderr
    require_nothing_in_memory(done)
