"""``kerasdist.launch``: a function in several workers, from where functions have no file."""

import re
import signal
import sys

import pytest

from tests.fresh import ROOT
from tests.multiprocess.launching import SECONDS, ended, left_after, running, wait_for

HEAD = """
import os, sys, time
from pathlib import Path
import kerasdist as kd

factor = 10

def joined():
    from kerasdist.cluster import detect
    from kerasdist.job.job import join_job
    job, _ = join_job(detect().membership(), {})
    job.after_connecting()
    return job

def ranks(start):
    return [start + factor * rank for rank in joined().all_gather_object("ranks", rank())]

def rank():
    return int(os.environ["KERASDIST_RANK"])

def fail(who):
    job = joined()
    if rank() == who:
        raise ValueError("a mistake of the user's", who)
    job.all_gather_object("what never comes", None)

class Bad(Exception):
    def __init__(self, one, two):
        super().__init__(one)

def fail_badly():
    raise Bad(1, 2)

def exit_with_3():
    sys.exit(3)

def sleep():
    job = joined()
    marked = Path(os.environ["MARKS"], str(rank()))
    marked.with_suffix(".new").write_text(str(os.getpid()))
    marked.with_suffix(".new").rename(marked)
    time.sleep(60)

def nested():
    joined()
    return kd.launch(rank, workers=2)
"""


def finish(code, *, by="-c", **environment):
    given, text = ([by, HEAD + code], "") if by == "-c" else ([by], f"{HEAD}\n{code}")
    return told(ended([sys.executable, *given], text=text, **environment))


def told(done):
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("by", ["-c", "-", "-i"])
def test_it_returns_what_worker_0_returned(by):
    code, out, err = finish("print(kd.launch(ranks, args=(5,), workers=2))\n", by=by)
    assert (code, out) == (0, "[5, 15]\n"), err


def test_in_a_script_a_function_need_not_be_below_name_main(tmp_path):
    (tmp_path / "beside.py").write_text("number = 7")
    (tmp_path / "script.py").write_text(
        HEAD + "import beside\nprint(kd.launch(lambda: ranks(beside.number), workers=2))"
    )
    code, out, err = told(ended([sys.executable, tmp_path / "script.py"], PYTHONPATH=str(ROOT)))
    assert (code, out) == (0, "[7, 17]\n"), err


@pytest.mark.parametrize("who", [0, 1])
def test_it_raises_what_a_worker_raised(who):
    code = f"""
try:
    kd.launch(fail, ({who},), workers=2)
except ValueError as error:
    print(error.args, error.__notes__)
"""
    _, out, err = finish(code)
    assert out.startswith(f'("a mistake of the user\'s", {who}) '), err
    assert f"[worker {who}/2] Traceback" in out
    assert "in fail" in out


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("fail_badly, workers=1", r"JobError: \[worker 0/1\].*Bad: 1"),
        ("exit_with_3, workers=1", r"JobError: \[worker 0/1\] .*exit code 3"),
        ("lambda: os._exit(0), workers=1", r"JobError: .* Received: exit code 0"),
        ("rank, ((one for one in ()),), workers=2", "UnsupportedError: .*can be pickled"),
        ("rank", "DeviceError: Expected a GPU.*workers='gpu'"),
        ("nested, workers=2", r"JobError: Expected a process that is no worker"),
    ],
)
def test_what_does_not_go(call, error):
    code, _, err = finish(f"kd.launch({call})", CUDA_VISIBLE_DEVICES="-1")
    assert code == 1
    assert re.search(f"^kerasdist.errors.{error}", err, re.M | re.S), err


def test_without_cloudpickle_a_function_of_a_notebook_is_refused():
    code = "sys.modules['cloudpickle'] = None\nkd.launch(rank, workers=2)"
    status, _, err = finish(code)
    assert status == 1
    assert "pip install 'kerasdist[launch]'" in err, err


def test_ctrl_c_ends_all(tmp_path):
    code = "try: kd.launch(sleep, workers=2)\nexcept KeyboardInterrupt: print('interrupted')"
    with running([sys.executable, "-c", HEAD + code], MARKS=str(tmp_path)) as process:
        both = wait_for(tmp_path, "0", "1")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (0, "interrupted\n"), err
    assert left_after(both, 5) == []
