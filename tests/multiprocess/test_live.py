"""``kerasdist run`` on a terminal: a table of all workers below their lines."""

import contextlib
import fcntl
import gzip
import json
import os
import pty
import re
import struct
import subprocess
import termios

import pytest

from tests.fresh import ROOT
from tests.multiprocess.launching import SECONDS, command_line, finish, said, write

SCRIPT = "tests.multiprocess.watched_script"
# What moves the cursor and sets the colour.
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Seconds by which the batches of worker 1 are later. Reports come once a second.
SLOW = 0.3


def on_a_terminal(*arguments: object, **environment: str) -> tuple[int, str]:
    """Runs the command line on a terminal of its own; returns its exit code and what was drawn."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
    with subprocess.Popen(
        command_line(*arguments),
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "NO_COLOR": "1", **environment},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        drawn = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while chunk := os.read(ours, 1 << 16):
                drawn += chunk
        os.close(ours)
        return process.wait(SECONDS), drawn.decode()


@pytest.mark.timeout(240)
def test_a_job_on_a_terminal(tmp_path):
    """Two workers train on torch: the slow one is marked, and both are in one profile."""
    telemetry, profile = tmp_path / "telemetry", tmp_path / "profile"
    code, drawn = on_a_terminal(
        *("run", "-n", 2, "--profile", "2:4", "--profile-dir", profile),
        *("--env", f"PYTHONPATH={ROOT}", "-m", SCRIPT, SLOW, telemetry),
        KERAS_BACKEND="torch",
    )
    assert code == 0, drawn
    lines = CODES.sub("", drawn).replace("\r", "").split("\n")
    assert any("[worker 0/2] trained on 2 replicas" in line for line in lines)
    slowest = [line[0] for line in lines if "slowest:" in line and line[0] in "01"]
    # While the first step is made, the other may be.
    assert slowest.count("1") > slowest.count("0"), slowest
    assert "samples/s" in drawn
    [first, second] = [line.split() for line in lines if line.rstrip().endswith("done")][-2:]
    assert first[:3] == ["0", "2/2", "6/6"]
    assert second[:3] == ["1", "2/2", "6/6"]
    assert sorted(path.name for path in telemetry.glob("*.jsonl")) == [
        "telemetry-worker-0.jsonl",
        "telemetry-worker-1.jsonl",
    ]
    assert "the profile is" in drawn
    with gzip.open(profile / "trace.json.gz") as file:
        require_steps_at_once(json.load(file)["traceEvents"])


def require_steps_at_once(events):
    """The profiled steps, which need both workers, end on both at once."""
    names = [one["args"]["name"] for one in events if one["name"] == "process_name"]
    assert [name.partition(" (")[0] for name in names] == ["worker 0", "worker 1"]
    ends = {
        (one["pid"], one["name"]): one["ts"] + one["dur"]
        for one in events
        if one["ph"] == "X" and one["name"].startswith("step ")
    }
    assert sorted(ends) == [(rank, f"step {step}") for rank in (0, 1) for step in (3, 4)]
    for name in ("step 3", "step 4"):
        assert abs(ends[0, name] - ends[1, name]) < 1e6 * SLOW / 2, ends  # in microseconds


@pytest.mark.parametrize("live", ["off", "auto"])
def test_no_view_without_a_terminal_or_if_it_is_not_wanted(tmp_path, live):
    script = write(tmp_path, "print(os.environ.get('KERASDIST_STATUS_FD'))")
    run = ("run", "--live", live, script)
    if live == "auto":
        done = finish(*run)
        assert (done.stdout, said(done)) == ("[worker 0/1] None\n", "")
        return
    code, drawn = on_a_terminal(*run)
    assert code == 0
    assert "[worker 0/1] None" in drawn
    assert "\x1b[2K" not in drawn
