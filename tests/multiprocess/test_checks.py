"""``kerasdist test``, ``bench`` and ``doctor``, as users call them."""

import json
import os
import socket

from tests.multiprocess.launching import finish
from tests.multiprocess.test_launch_hosts import path

__all__ = ["path"]  # a fixture

# These train, where what other tests start does nothing.
SECONDS = 300

# The smallest script that shows the check, on torch, which starts the fastest.
TRAIN = """
import keras, numpy as np
import kerasdist as kd
strategy = kd.MirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.zeros((32, 4), "float32")
model.fit(x, x[:, :1], batch_size=8, verbose=0)
model.fit(x, x[:, :1], batch_size=8, epochs=5, verbose=0)
kd.print("said by the script")
"""


def test_a_training_is_compared_with_one_device():
    done = finish("test", "--backend", "torch", "--json", seconds=SECONDS)
    assert done.returncode == 0, done.stderr
    [found] = json.loads(done.stdout).values()
    verdicts = {one["check"]: one["verdict"] for one in found}
    assert verdicts == dict.fromkeys(
        ["devices", "sum", "gather", "broadcast", "bandwidth", "training", "workers"], "ok"
    )
    assert found[0]["found"].startswith("2 replicas of 2 workers")


def test_a_job_that_cannot_run_is_a_problem(tmp_path):
    (tmp_path / "keras.py").write_text("raise SystemExit('no keras here')", encoding="utf-8")
    paths = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    done = finish("test", "--backend", "torch", "-n", 1, "--json", PYTHONPATH=paths)
    assert done.returncode == 1
    [[found]] = json.loads(done.stdout).values()
    assert (found["check"], found["verdict"]) == ("job", "problem")
    assert "worker 0/1: exit code 1; no keras here" in found["found"]


def test_a_script_is_measured_as_it_is(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN, encoding="utf-8")
    arguments = ("bench", "--backend", "torch", "--workers", 1, "--json")
    done = finish(*arguments, script, seconds=SECONDS)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    [row] = told["rows"]
    assert (row["workers"], row["replicas"], row["batch"]) == (1, 1, 8)
    assert row["steps"] == 16  # of the longer fit, without its first epoch
    assert row["rate"] > 0
    assert row["efficiency"] == 1.0


def test_a_script_without_fit_is_an_error(tmp_path):
    script = tmp_path / "nothing.py"
    script.write_text("print('done')", encoding="utf-8")
    done = finish("bench", "--backend", "torch", "--workers", 1, "--json", script)
    assert done.returncode == 1
    [row] = json.loads(done.stdout)["rows"]
    assert "no fit of a model" in row["failure"]


def test_hosts_are_looked_at(path):
    """One is this machine, one is it through ssh, and one is down."""
    here = socket.gethostname()
    done = finish("doctor", "--hosts", f"{here},n1,down", "--json", **path)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    of_host = {
        name: {one["check"] for one in found if one["where"] == name} for name in (here, "n1")
    }
    assert of_host[here] == of_host["n1"] >= {"versions", "ports", "disk"}
    [ssh] = [one for one in found if one["check"] == "ssh"]
    assert (ssh["where"], ssh["verdict"]) == ("down", "problem")
    assert "Connection refused" in ssh["found"]
    between = {one["check"]: one for one in found if one["where"] == "all hosts"}
    assert between["versions"]["verdict"] == "ok"
    [unknown] = [one for one in found if one["where"] == f"{here} to n1"]
    assert (unknown["check"], unknown["verdict"]) == ("names", "problem")
