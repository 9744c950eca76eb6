"""`keep_in_memory=True`: what is lost with a worker, a host and the disk comes from another host.

With as many workers before and after, the runs are equal to the last bit.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.environment import CPU_DEVICES, everything, values
from tests.multiprocess import hosts
from tests.multiprocess.launching import finish, write

SECONDS = 600
CASES = [("torch", "full")]
if everything():
    CASES += [("torch", "none"), ("jax", "none"), ("jax", "full"), ("tensorflow", "none")]
SCRIPT = "tests.multiprocess.memory_script"


def run(folder, case, what, *arguments, **environment):
    folder.mkdir(exist_ok=True)
    backend, sharding = case
    environment |= {"KERAS_BACKEND": backend, **values(CPU_DEVICES)}
    call = (*arguments, "-m", SCRIPT, folder, what, sharding)
    done = finish("run", *call, seconds=SECONDS, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    require_gone(done)
    return done


def require_gone(done):
    folders = set(re.findall(r"memory (/dev/shm/kerasdist-\w+)", done.stdout))
    assert len(folders) == 1, done.stdout + done.stderr
    assert not Path(folders.pop()).exists()


def require_equal(found, expected, rtol=0.0):
    one, other = np.load(found / "values.npz"), np.load(expected / "values.npz")
    assert one.files == other.files
    for name in one.files:
        np.testing.assert_allclose(one[name], other[name], rtol, atol=rtol / 10, err_msg=name)
    one, other = (json.loads((each / "history.json").read_text()) for each in (found, expected))
    assert one.keys() == other.keys()
    for name, values_of in one.items():
        np.testing.assert_allclose(values_of, other[name], rtol, err_msg=name)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_worker_a_host_and_the_disk_are_lost(tmp_path, case):
    """The chief is killed; then its host is lost, and one that has no copy takes its place.

    Then its host is lost, and there is none to take its place, in `make test-everything`.
    """
    whole, worker, host, fewer = (tmp_path / name for name in ("whole", "worker", "host", "fewer"))
    run(whole, case, "nothing", "--workers", 2)

    done = run(worker, case, "worker", "--workers", 2, "--max-restarts", 1)
    assert done.stdout.count("from (1, 2)") == 2, done.stdout + done.stderr
    require_equal(worker, whole)

    host.mkdir()
    hosts.take_down(host, hosts.NAMES[0])
    listed = ("--hosts", ",".join(hosts.NAMES[:3]))
    call = (*listed, "--workers", "2:2", "--max-restarts", 1)
    done = run(host, case, "host", *call, **hosts.make(host))
    assert f"attempt 0: rank 0 on {hosts.NAMES[1]}" in done.stdout, done.stdout + done.stderr
    assert f"attempt 1: rank 0 on {hosts.NAMES[0]}" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("from (1, 2)") == 2, done.stdout + done.stderr
    require_equal(host, whole)
    if not everything():
        return

    fewer.mkdir()
    listed = ("--hosts", ",".join(hosts.NAMES[1:3]))
    call = (*listed, "--workers", "1:2", "--max-restarts", 1)
    done = run(fewer, case, "host", *call, **hosts.make(fewer))
    assert f"attempt 1: rank 0 on {hosts.NAMES[2]}" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("from (1, 2)") == 1, done.stdout + done.stderr
    # One worker adds the rows of a batch in another order than two, in float32.
    require_equal(fewer, whole, rtol=1e-4)


FAILS = """
memory = Path(os.environ["KERASDIST_MEMORY"])
memory.mkdir(exist_ok=True)
(memory / f"of-{rank}").touch()
print("memory", memory, flush=True)
mark(f"there-{rank}")
wait_for("there-0", "there-1")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_job_that_fails_leaves_nothing_in_memory(tmp_path):
    done = finish("run", "--workers", 2, write(tmp_path, FAILS))
    assert done.returncode == 128 + 9, done.stdout + done.stderr
    require_gone(done)
