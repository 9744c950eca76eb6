"""``kerasdist join``: a machine that was not listed is taken in at a backup, and may go again.

Here it is this machine, which reaches the launcher by the loopback.
"""

import re
import signal
import socket

import pytest

from tests.multiprocess.launching import finish, left_after, started, wait_for, write

SECRET = {"KERASDIST_SECRET": "of these tests"}
SECONDS = 120

# One worker is listed. It writes backups until others have joined, and then left again.
SCRIPT = """
from kerasdist.job.launcher import channel
workers = int(os.environ["KERASDIST_WORKERS"])
print("attempt", restart, "of", workers, os.environ["KERASDIST_LOCAL_RANK"], flush=True)
assert os.environ["KERASDIST_SECRET"] == "of these tests"
mark(f"there-{restart}-{rank}")
wait_for(*(f"there-{restart}-{each}" for each in range(workers)))
def back_up():
    while True:
        if rank == 0:
            channel().tell({"backup": [1, 0, 9]})
        time.sleep(0.05)
if restart == 0:
    back_up()
"""


def port_of(job):
    for line in job.stderr:
        if found := re.search(r"kerasdist join .+:(\d+)", line):
            return found[1]
    raise AssertionError("the launcher said no port")


def run(script, *more):
    return started("run", "--workers", "1:3", "--join-port", 0, *more, script, **SECRET)


def join(port, *more, **environment):
    return started("join", *more, f"127.0.0.1:{port}", **{**SECRET, **environment})


def ended(process):
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out + err


def test_a_machine_joins_and_the_job_ends(tmp_path):
    script = write(tmp_path, SCRIPT + "sys.exit(0 if workers == 3 else 9)")
    with run(script) as job, join(port_of(job), "--workers", 2) as machine:
        code, said = ended(job)
        assert code == 0, said
        found = re.findall(r"\[worker (\d)/(\d)\] attempt (\d) of (\d) (\d)", said)
        assert sorted(found) == [
            *[("0", "1", "0", "1", "0"), ("0", "3", "1", "3", "0")],
            *[("1", "3", "1", "3", "0"), ("2", "3", "1", "3", "1")],
        ], said
        assert said.count("127.0.0.1 has joined with 2 workers") == 1, said
        assert "goes on with 3 of 3 workers" in said
        assert ended(machine) == (0, "")


def test_it_gets_the_jobs_exit_code_and_relays_its_workers(tmp_path):
    script = write(tmp_path, SCRIPT + "sys.exit(5 if rank == 1 else 0)")
    with run(script) as job, join(port_of(job)) as machine:
        code, said = ended(job)
        assert code == 5, said
        assert "worker 1/2 failed" in said
        assert "exit code 5" in said
        assert ended(machine) == (5, "")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_machine_that_vanishes_is_a_lost_host(tmp_path, number):
    script = write(tmp_path, SCRIPT + "if restart == 1:\n    back_up()")
    with run(script, "--max-restarts", 1) as job, join(port_of(job)) as machine:
        [worker] = wait_for(tmp_path, "there-1-1")
        machine.send_signal(number)
        code, said = ended(job)
        assert code == 0, said
        sizes = dict(re.findall(r"attempt (\d) of (\d)", said))
        assert sizes == {"0": "1", "1": "2", "2": "1"}, said
        assert not left_after([worker], 30)


def test_it_is_there_when_the_job_starts_again(tmp_path):
    """Its next seat is taken before the launcher knows that its worker has ended."""
    script = write(tmp_path, SCRIPT + "sys.exit(3 if restart == 1 and rank == 1 else 0)")
    with run(script, "--max-restarts", 1) as job, join(port_of(job)) as machine:
        code, said = ended(job)
        assert code == 0, said
        sizes = dict(re.findall(r"attempt (\d) of (\d)", said))
        assert sizes == {"0": "1", "1": "2", "2": "2"}, said
        assert said.count("has joined") == 1, said
        assert ended(machine) == (0, "")


def test_without_the_secret_nobody_joins(tmp_path):
    script = write(tmp_path, SCRIPT)
    with run(script) as job:
        port = port_of(job)
        with join(port, KERASDIST_SECRET="another") as machine:
            code, said = ended(machine)
        assert code == 1, said
        assert "its KERASDIST_SECRET is not the one of this job" in said
        with join(port, KERASDIST_SECRET="") as machine:
            code, said = ended(machine)
        assert code == 1
        assert "KERASDIST_SECRET_FILE, by which a machine proves" in said
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 4096)
        job.send_signal(signal.SIGTERM)
        _, said = ended(job)
        assert "has joined" not in said
        assert "attempt 1" not in said


def test_a_launcher_that_is_gone(tmp_path):
    script = write(tmp_path, SCRIPT + "time.sleep(60)")
    with run(script) as job, join(port_of(job)) as machine:
        workers = wait_for(tmp_path, "there-1-0", "there-1-1")
        job.kill()
        code, said = ended(machine)
        assert code == 1
        assert "Expected the launcher of a job at 127.0.0.1:" in said
        assert not left_after(workers, 30)


def test_what_is_refused(tmp_path):
    script = write(tmp_path, "")
    call = ("run", "--join-port", 0, "--workers")
    done = finish(*call, 2, script, **SECRET)
    assert done.returncode == 1
    assert "Expected a range of workers, because the job may shrink and grow" in done.stderr
    done = finish(*call, "1:2", script, KERASDIST_SECRET="")
    assert done.returncode == 1
    assert "Expected KERASDIST_SECRET or KERASDIST_SECRET_FILE" in done.stderr
    done = finish("join", "127.0.0.1", **SECRET)
    assert done.returncode == 1
    assert "host:port" in done.stderr
