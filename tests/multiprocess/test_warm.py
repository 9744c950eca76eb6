"""Workers of an elastic job that are forked from its warm process, and what is as in any worker."""

import re
import signal

import pytest

from tests.environment import everything
from tests.multiprocess.launching import left_after, started, wait_for, write

# What a worker says first: whether it is a fork of the warm process, whose fork is then its parent.
SCRIPT = """
import random
is_warm = "keras" in sys.modules
print("attempt", restart, "rank", rank, "warm" if is_warm else "cold", sys.argv[1:], flush=True)
from kerasdist.job.launcher import channel, tell_launcher
if restart == 2 and rank == 0:
    os.environ["XDG_ANYTHING"] = "1"
if restart == 2 and rank == 1:
    os.environ["OMP_WAIT_POLICY"] = "passive"  # frameworks read it as they are imported
assert os.environ["KERASDIST_RANK"] == str(rank), os.environ
assert os.getpgid(0) == os.getpid() and __name__ == "__main__", __name__
assert Path(sys.path[0]) == here and sys.orig_argv[1:2] == [__file__], (sys.path, sys.orig_argv)
assert os.readlink("/proc/self/fd/0") == os.devnull
tell_launcher()
job = os.environ["KERASDIST_JOB_ID"].rpartition("-")[0]
mark(f"at-{restart}-{rank}")
wait_for(f"at-{restart}-0", f"at-{restart}-1")
if restart == 0:
    if rank == 0:
        channel().tell({"backup": [1, 0, 9], "frameworks": [os.environ["KERAS_BACKEND"]]})
    while f"@kerasdist-{job}" not in Path("/proc/net/unix").read_text():
        time.sleep(0.05)
    sys.exit(3 if rank else "the other has failed")
import numpy
(here / f"draws-{restart}-{rank}").write_text(f"{numpy.random.random()} {random.random()}")
wait_for(f"draws-{restart}-0", f"draws-{restart}-1")
if restart == 1 and rank == 1:
    left = subprocess.Popen(["sleep", "600"])
    (here / "left").write_text(str(left.pid))
    os.kill(os.getpid(), signal.SIGSEGV)
if restart == 2 and rank == 0:
    os.kill(os.getppid(), signal.SIGKILL)
if restart == 3:
    above = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
    (here / f"parent-{rank}").write_text(str(os.getppid()))
    (here / "warm").write_text(above)
    mark(f"last-{rank}")
time.sleep(600)
"""


@pytest.mark.parametrize("backend", ["jax", "tensorflow", "torch"] if everything() else ["jax"])
def test_workers_are_forked(tmp_path, backend):
    script = write(tmp_path, SCRIPT)
    call = ("run", "--workers", "1:2", "--max-restarts", 3, script, "of", "its")
    with started(*call, KERAS_BACKEND=backend) as launcher:
        workers = wait_for(tmp_path, "last-0", "last-1")
        others = wait_for(tmp_path, "warm", "parent-0", "parent-1")
        assert left_after(wait_for(tmp_path, "left"), 5) == []
        launcher.send_signal(signal.SIGKILL)
        assert left_after([*workers, *others], 10) == []
        output, errors = launcher.communicate()
    found = re.findall(r"attempt (\d) rank (\d) (\w+) \['of', 'its'\]", output)
    assert sorted(found) == [
        ("0", "0", "cold"),
        ("0", "1", "cold"),
        ("1", "0", "warm"),
        ("1", "1", "warm"),
        ("2", "0", "warm"),
        ("2", "1", "cold"),  # again, as it set what was read
        ("2", "1", "warm"),
        ("3", "0", "warm"),
        ("3", "1", "warm"),
    ], output + errors
    draws = [path.read_text().split() for path in tmp_path.glob("draws-*")]
    assert len({draw for pair in draws for draw in pair}) == 2 * len(draws) == 12
    reasons = re.findall(r"worker \d/2 failed after .* s: (.*)", errors)
    assert reasons[1:] == ["ended by SIGSEGV", "ended by SIGKILL"], errors
