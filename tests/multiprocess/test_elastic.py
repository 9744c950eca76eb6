"""``kerasdist run --workers A:B``: a job goes on with the hosts that are left, and with more later.

The policy of what is left out is in tests/unit/cli/launch/test_elastic.py. Here hosts are lost and
come back as in `tests.multiprocess.hosts`.
"""

import json
import re

import numpy as np
import pytest

from tests.environment import CPU_DEVICES, everything, values
from tests.fresh import run_python
from tests.multiprocess import hosts
from tests.multiprocess.launching import finish, write

SECONDS = 900

SCRIPT = """
from kerasdist.job.launcher import channel
from tests.multiprocess import hosts
workers = int(os.environ["KERASDIST_WORKERS"])
print("attempt", restart, "of", workers, "on", os.environ["ON"], flush=True)
hosts.say_where(here)
mark(f"there-{restart}-{rank}")
wait_for(*(f"there-{restart}-{each}" for each in range(workers)))
if restart == 0:
    if rank == 0:
        channel().tell({"backup": [1, 3, 9]})
    if rank == 1:
        time.sleep(0.5)  # the launcher has read the report
        hosts.lose(here, 1)
    time.sleep(60)
if restart == 1:
    hosts.bring_back(here)
    while True:
        if rank == 0:
            channel().tell({"backup": [2, 0, 9]})
        time.sleep(0.05)
"""


def run(folder, *arguments, **environment):
    hosts.take_down(folder, hosts.NAMES[3])
    call = ("run", "--hosts", ",".join(hosts.NAMES), *arguments)
    return finish(*call, seconds=SECONDS, **{**hosts.make(folder), **environment})


def sizes(done):
    found = re.findall(r"attempt (\d+) of (\d+)", done.stdout)
    return [int(size) for _, size in sorted(set(found), key=lambda each: int(each[0]))]


def test_hosts_go_and_come_back(tmp_path):
    script = write(tmp_path, SCRIPT)
    done = run(tmp_path, "--workers", "2:4", "--max-restarts", 1, script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sizes(done) == [3, 2, 4], done.stdout + done.stderr
    told = [line for line in done.stderr.splitlines() if "[kerasdist] the job goes on" in line]
    assert told == [
        "[kerasdist] the job goes on with 2 to 4 workers; 1 restart at most",
        "[kerasdist] the job goes on with 2 of 4 workers from epoch 2, step 4; hosts that do not "
        "answer: 127.0.0.2, 127.0.0.5 (restart 1 of 1)",
        "[kerasdist] the job goes on with 4 of 4 workers from epoch 3, step 1 (no restart is "
        "counted)",
    ]
    assert "the workers have ended at a backup, so that waiting workers can be added" in done.stderr


def test_too_few_are_left(tmp_path):
    script = write(tmp_path, SCRIPT)
    done = run(tmp_path, "--workers", "2:4", script)  # no restart
    assert done.returncode == 255
    assert sizes(done) == [3]


# Sizes 3, 2, 4, 1: a change in the middle of each call of `fit`.
RUNS = {"torch": [("none", "loader")]}
if everything():
    others = [("full", "arrays", "arrays"), ("passes", "arrays")]
    RUNS = {
        "torch": [("none", "arrays", "loader", "tfdata"), *others],
        "jax": [("none", "arrays", "pydataset"), *others],
        "tensorflow": [("none", "arrays", "pydataset", "tfdata"), others[1]],
    }
TRAINING = "tests.multiprocess.elastic_script"


@pytest.mark.parametrize(
    ("backend", "arguments"), [(backend, one) for backend, runs in RUNS.items() for one in runs]
)
def test_the_numbers_of_the_run_that_was_never_touched(tmp_path, backend, arguments):
    """In float64 workers of another number add in another order, which rounds to 1e-16 a step.

    Adam and some dozens of steps make 1e-13 of it; 1e-9 leaves room, and is far below what one row
    that is lost or doubled changes.
    """
    disturbed, alone = tmp_path / "job", tmp_path / "alone"
    disturbed.mkdir()
    alone.mkdir()
    common = {"KERAS_BACKEND": backend, **values(CPU_DEVICES)}
    if arguments[0] == "passes":
        common["KERASDIST_CHECK"] = "off"  # calls the model for all rows
    call = ("--workers", "1:4", "--max-restarts", 2, "-m", TRAINING)
    done = run(disturbed, *call, disturbed, *arguments, **common)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sizes(done) == [3, 2, 4, 1][: len(arguments)], done.stdout + done.stderr
    run_python("-m", TRAINING, alone, *arguments, seconds=SECONDS, **common)
    for number, kind in enumerate(arguments[1:]):
        name = f"{number}-{kind}"
        expected, found = np.load(alone / f"{name}.npz"), np.load(disturbed / f"{name}.npz")
        assert expected.files == found.files
        for key in expected.files:
            scale = max(np.abs(expected[key]).max(), 1e-3)
            assert np.allclose(found[key], expected[key], rtol=0, atol=1e-9 * scale), (name, key)
        history, undisturbed = (
            json.loads((folder / f"{name}.json").read_text()) for folder in (disturbed, alone)
        )
        assert history.keys() == undisturbed.keys()
        for metric, expected_values in undisturbed.items():
            np.testing.assert_allclose(history[metric], expected_values, rtol=1e-9, err_msg=name)
        lines, lines_alone = (
            np.genfromtxt(folder / f"{name}.csv", delimiter=",", skip_header=1)
            for folder in (disturbed, alone)
        )
        np.testing.assert_allclose(lines, lines_alone, rtol=1e-9, err_msg=name)
