"""A script that starts the other ranks of itself ends as ``kerasdist run`` does."""

import os
import re
import signal
import sys

import pytest

from tests.fresh import ROOT
from tests.multiprocess.launching import SECONDS, ended, left_after, running, wait_for

SCRIPT = str(ROOT / "tests" / "multiprocess" / "ranks_script.py")


def started(folder, *command):
    """Starts a script that starts another, and sees to it that both end."""
    return running([sys.executable, *command], MARKS=str(folder), PYTHONPATH=str(ROOT))


def finish(folder, *command, cwd=ROOT):
    marks = {"MARKS": str(folder), "PYTHONPATH": str(ROOT)}
    done = ended([sys.executable, *command], folder=cwd, **marks)
    return done.returncode, done.stdout, done.stderr


def failure(err):
    return re.findall(r"^\[kerasdist\] worker (\d/\d) failed after [\d.]+ s: (.*)$", err, re.M)


@pytest.mark.parametrize("command", [[SCRIPT], ["-m", "tests.multiprocess.ranks_script"]])
def test_the_others_run_the_same_script_with_the_same_arguments(tmp_path, command):
    code, out, err = finish(tmp_path, "-W", "ignore", *command, "tell", "a b", "-x")
    told = "told {} ['tell', 'a b', '-x'] __main__"
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[worker 1/2] {told.format(1)}", told.format(0)]
    assert "2 processes, one a device: cpu:0, cpu:0. This process is worker 0" in err


def test_a_relative_script_that_has_changed_its_folder(tmp_path):
    code = f"import os; os.chdir({str(tmp_path)!r}); exec(open({SCRIPT!r}).read())"
    (tmp_path / "here.py").write_text(code)
    (tmp_path / "sub").mkdir()
    assert finish(tmp_path, "../here.py", "nothing", cwd=tmp_path / "sub")[0] == 0


@pytest.mark.parametrize(
    ("deed", "code", "blamed"),
    [
        ("nothing", 0, []),
        ("exit_with_3", 3, [("1/2", "exit code 3")]),
        ("one_exits_with_3", 3, [("1/2", "exit code 3")]),
        ("one_raises", 1, [("1/2", "exit code 1")]),
        ("chief_raises", 1, []),
        ("fail_early", 1, [("1/2", "exit code 1")]),
        ("end_early", 1, [("1/2", "exit code 1")]),
    ],
)
def test_the_exit_code_is_that_of_the_job(tmp_path, deed, code, blamed):
    status, _, err = finish(tmp_path, SCRIPT, deed)
    assert (status, failure(err)) == (code, blamed), err
    if deed == "one_raises":
        assert '[kerasdist]   | KeyError: "a mistake of the user\'s"' in err
    if deed == "end_early":
        assert (
            "[kerasdist]   | kerasdist: this process has ended before it made the strategy" in err
        )
    if deed == "chief_raises":
        assert re.search(r"^KeyError", err, re.M)
        assert "[worker 1/2] worker 0" in err


@pytest.mark.parametrize("deed", ["sleep", "wait_for_others"])
def test_a_rank_that_is_killed_ends_the_chief(tmp_path, deed):
    with started(tmp_path, SCRIPT, deed) as process:
        _, other = wait_for(tmp_path, "ready-0", "ready-1")
        os.kill(other, signal.SIGKILL)
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 137, err
    assert failure(err) == [("1/2", "ended by SIGKILL")]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("deed", ["sleep", "fork"])
def test_no_rank_outlives_the_chief(tmp_path, number, deed):
    with started(tmp_path, SCRIPT, deed) as process:
        both = wait_for(tmp_path, "ready-0", "ready-1")
        if deed == "fork":
            [forked] = wait_for(tmp_path, "forked")
        process.send_signal(number)
        process.wait(SECONDS)
        assert process.returncode == -number
        assert left_after(both, 10) == []
        if deed == "fork":  # as without kerasdist
            assert left_after([forked], 0) == [forked]


def test_ctrl_c_reaches_all_and_ends_them(tmp_path):
    with started(tmp_path, SCRIPT, "sleep") as process:
        both = wait_for(tmp_path, "ready-0", "ready-1")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode in (-signal.SIGINT, 130), err
    assert left_after(both, 10) == []
    assert (out, failure(err)) == ("", [])
    for rank in (0, 1):
        assert f"[worker {rank}/2] interrupted (Ctrl-C) at {SCRIPT}:" in err


def test_ctrl_c_that_the_script_catches_ends_nobody(tmp_path):
    with started(tmp_path, SCRIPT, "catch") as process:
        wait_for(tmp_path, "ready-0", "ready-1")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == ["[worker 1/2] caught 1", "caught 0"]
