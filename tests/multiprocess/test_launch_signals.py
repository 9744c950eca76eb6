"""Signals to the launcher reach the workers, and its death ends them: no orphan is left."""

import os
import signal
from pathlib import Path

import pytest

from tests.multiprocess.launching import left_after, started, wait_for, write
from tests.multiprocess.test_launch_hosts import path

__all__ = ["path"]  # a fixture

HANDLE = """
def handle(number, frame):
    print("got", signal.Signals(number).name)
    sys.exit(CODE)
signal.signal(signal.SIGINT, handle)
signal.signal(signal.SIGTERM, handle)
mark(f"pid{rank}")
time.sleep(60)
"""

SLEEP = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
(here / f"child{rank}").write_text(str(child.pid))
(here / f"supervisor{rank}").write_text(str(os.getppid()))
mark(f"pid{rank}")
time.sleep(60)
"""
ALL = [f"{kind}{rank}" for kind in ("pid", "child", "supervisor") for rank in (0, 1)]
HERE, BY_SSH = ("-n", 2), ("--hosts", "n1,n2")


@pytest.mark.parametrize(
    ("where", "sent", "passed_on", "code", "expected"),
    [
        (HERE, "SIGINT", "SIGINT", 1, 130),
        (HERE, "SIGTERM", "SIGTERM", 1, 143),
        (HERE, "SIGTERM", "SIGTERM", 76, 76),
        (HERE, "SIGHUP", "SIGTERM", 0, 0),
        (BY_SSH, "SIGTERM", "SIGTERM", 0, 0),
    ],
)
def test_a_signal_is_passed_on(tmp_path, path, where, sent, passed_on, code, expected):
    number = getattr(signal, sent)
    script = write(tmp_path, HANDLE.replace("CODE", str(code)))
    with started("run", *where, "--max-restarts", 3, script, **path) as launcher:
        wait_for(tmp_path, "pid0", "pid1")
        launcher.send_signal(number)
        out, err = launcher.communicate(timeout=20)
    assert launcher.returncode == expected
    assert sorted(out.splitlines()) == [f"[worker {rank}/2] got {passed_on}" for rank in (0, 1)]
    assert f"stopped by {sent}" in err
    assert "again" not in err


def test_a_second_signal_ends_at_once(tmp_path):
    body = "signal.signal(signal.SIGTERM, lambda *_: mark(f'got{rank}'))\n" + SLEEP.replace(
        "time.sleep(60)", "while True: time.sleep(1)"
    )
    with started("run", "-n", 2, "--timeout-on-stop", 50, write(tmp_path, body)) as launcher:
        processes = wait_for(tmp_path, *ALL)
        launcher.terminate()
        wait_for(tmp_path, "got0", "got1")
        launcher.terminate()
        _, err = launcher.communicate(timeout=10)
    assert launcher.returncode == 143
    assert "worker 1/2 was told to stop a second time, and was killed" in err
    assert left_after(processes, 2) == []


def test_a_worker_alone_gets_the_signal_not_what_it_has_started(tmp_path):
    """A data loader's processes must live until the worker has backed up."""
    body = SLEEP.replace("mark(", "signal.signal(signal.SIGTERM, check)\nmark(")
    check = """
def check(number, frame):
    time.sleep(0.3)
    print("child", child.poll())
    sys.exit(0)
"""
    with started("run", "-n", 2, write(tmp_path, check + body)) as launcher:
        processes = wait_for(tmp_path, *ALL)
        launcher.terminate()
        out, _ = launcher.communicate(timeout=20)
    assert sorted(out.splitlines()) == [f"[worker {rank}/2] child None" for rank in (0, 1)]
    assert left_after(processes, 2) == []


@pytest.mark.parametrize(
    ("where", "victim", "first"),
    [
        (HERE, "launcher", ""),
        (HERE, "supervisors", ""),
        (HERE, "launcher", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"),
        (BY_SSH, "launcher", ""),  # what ends it ends ssh's input
    ],
    ids=["launcher", "supervisors", "workers that cling to life", "by ssh"],
)
def test_no_orphan_is_left(tmp_path, path, where, victim, first):
    script = write(tmp_path, first + SLEEP)
    with started("run", *where, "--timeout-on-stop", 1, script, **path) as launcher:
        processes = wait_for(tmp_path, *ALL)
        if victim == "launcher":
            launcher.kill()
            launcher.wait(10)
        else:
            for supervisor in wait_for(tmp_path, "supervisor0", "supervisor1"):
                os.kill(supervisor, signal.SIGKILL)
            assert launcher.wait(20) == 137
    # If its supervisor is killed, nobody ends the processes that a worker has started.
    expected = [] if victim == "launcher" else wait_for(tmp_path, "child0", "child1")
    assert sorted(left_after(processes, 4)) == sorted(expected)


def test_ctrl_c_in_a_terminal_reaches_the_launcher_alone(tmp_path):
    """The workers are in sessions of their own, and so get the signal once."""
    with started("run", "-n", 2, write(tmp_path, SLEEP)) as launcher:
        workers = wait_for(tmp_path, "pid0", "pid1")
        assert {os.getsid(each) for each in workers}.isdisjoint({os.getsid(launcher.pid)})
        assert Path(f"/proc/{workers[0]}/fd/0").readlink() == Path("/dev/null")
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=20)
    assert launcher.returncode == 130
