"""A job's workers agree, or learn who is lost and why, in bounded time; no framework is needed."""

import json
import re
import signal

import pytest

import kerasdist
from kerasdist.job.interruption import ExitCode
from tests.multiprocess.forks import Nursery, report, require
from tests.multiprocess.job_script import HEARTBEAT, JOIN, MEETING
from tests.multiprocess.launching import beside, job_of

# For processes to start, and for a main thread to come to an end by itself.
SLACK = 60.0
LOST = int(ExitCode.LOST_WORKER)


def _apart(others: str, one: str) -> str:
    """The message if worker 1 is elsewhere; which other worker came first is not fixed."""
    first = f"(worker 0 is|workers 0, 2 are) at {others}; worker 1 is at {one}"
    last = f"worker 1 is at {one}; worker 2 is at {others}"
    return f"{first}|{last}"


def _left_early(others: str) -> str:
    """What is said where the script of worker 1 ends first."""
    some = "(worker [02] is|workers 0, 2 are)"
    return f"worker 1 .* is lost: it came to the end of its script, but {some} at {others}"


# The behaviour of worker 1 (the chief's, in those that name it), the survivors' exit codes, what
# they say, and after how many seconds at the latest.
LOSSES = [
    ("be_killed", LOST, "worker 1 .* is lost: .* it was killed", 0),
    ("be_stopped", LOST, "worker 1 .* has not given a sign of life for 2 s", HEARTBEAT),
    ("raise_an_error", LOST, "worker 1 .* ended with KeyError: .*a mistake", 0),
    ("exit_with_3", LOST, _left_early("'the next step'"), 0),
    ("exit_with_a_message", LOST, "worker 1 .*: it ended with exit code 1: no more data", 0),
    ("exit_with_0", LOST, _left_early("'step 2 of fit'"), 0),
    ("go_elsewhere", 1, _apart("'end of epoch 1'", "'step 6'"), 0),
    ("disagree", 1, "same models. Received: units=5 on worker 1, 6 on worker 2, 4 on worker 0", 0),
    ("hang_in_other_batches", 1, "'4 program 1' on worker 1, '4 program 0' on w", HEARTBEAT),
    ("stay_away", LOST, "worker 1 did not come to 'the next step' within 3 s", MEETING),
    ("stand_still", LOST, "no worker has begun a step for 3 s .*the last is worker [12]", MEETING),
    (
        "stand_still_in_other_collectives",
        LOST,
        r"(?s)workers 0, 2 are in fit, step 1, last collectives: number 1: all_reduce float32\[4\] "
        r"in the group of all workers, job_script.py:\d+; number 2: all_gather .*"
        r"worker 1 is in fit, step 1, last collectives: number 1: .*; number 2: broadcast .*"
        r"This worker was here:.*Its last collectives: number 2: all_gather ",
        MEETING,
    ),
    ("chief_does_not_save", LOST, "worker 0 did not save '/folder/m.keras' within 3 s", MEETING),
    ("never_come", 1, "worker 1 of 3 did not come within 4 s", JOIN),
    ("broken_engine", LOST, "(?s)Connection closed by peer.*worker 1 .* it was killed", 0),
]


# A worker of an older release, as far as the others can tell.
SCRIPT = "tests.multiprocess.job_script"
OLDER = f"""
import runpy, kerasdist.core
kerasdist.core.__version__ = "0.0.1"
runpy.run_module({SCRIPT!r}, run_name="__main__")
"""

_NOT_SAVED = "worker 0 .* is lost: it ended with PermissionError: /folder/m.keras"
# What all do, or the chief; the exit codes, and what is said by those that have the last one.
ENDS = {
    "chief_is_killed": ([-9, LOST, LOST], "the chief, worker 0, is lost"),
    "chief_fails_to_save": ([1, LOST, LOST], _NOT_SAVED),
    "wait_at_exit": ([0, 0, 0], r"\Awaited\s\Z"),
    "end_before_connecting": ([0, 0, 0], r"\A\Z"),
    "all_are_suspended": ([0, 0, 0], r"\Awent on \[0, 1, 2\]\s\Z"),
    "own_error": ([1, 1, 1], "ValueError: a mistake of the user's"),
    "all_exit_with_3": ([3, 3, 3], ""),
}
OTHERS = ["end_well", "all_are_interrupted", "one_is_interrupted", "save"]


@pytest.fixture(scope="module")
def workers():
    with Nursery("-m", SCRIPT) as nursery:
        yield nursery


@pytest.fixture(scope="module")
def jobs(workers):
    """All jobs of this file, begun together, since most of their time is waiting."""
    behaviours = [*(loss[0] for loss in LOSSES), *ENDS, *OTHERS]
    return {one: workers.begin([one], job_of(3)) for one in behaviours}


@pytest.mark.parametrize(
    ("behaviour", "code", "said", "seconds"), LOSSES, ids=[loss[0] for loss in LOSSES]
)
def test_survivors_end_and_name_the_lost_worker(jobs, behaviour, code, said, seconds):
    # A worker that is stopped ends with nobody's help; one that dies has its own code.
    ended = jobs[behaviour].join(SLACK + seconds, but=[1] if behaviour == "be_stopped" else [])
    for worker in ended:
        if worker.rank == 1:
            continue
        assert worker.code == code, report(ended)
        assert f"[worker {worker.rank}/3]" in worker.output, report(ended)
    assert re.search(said, ended[0].output), report(ended)


@pytest.mark.parametrize("behaviour", ENDS)
def test_all_end_as_they_should(jobs, behaviour):
    """A job whose workers were all suspended goes on."""
    ended, (codes, said) = jobs[behaviour].join(SLACK + 6 * HEARTBEAT), ENDS[behaviour]
    assert [worker.code for worker in ended] == codes, report(ended)
    for worker in ended:
        assert worker.code != codes[-1] or re.search(said, worker.output), report(ended)


def test_workers_exchange_facts_and_end_well(jobs):
    ended = jobs["end_well"].join(SLACK)
    assert [worker.code for worker in ended] == [0, 0, 0], report(ended)
    assert len({worker.output for worker in ended}) == 1, report(ended)
    assert "halves. Received: half=1 on worker 2, 0 on workers 0, 1." in ended[0].output


def test_ctrl_c_prints_a_line_per_worker(jobs):
    ended = jobs["all_are_interrupted"].join(SLACK)
    said = r"\[worker {}/3\] interrupted \(Ctrl-C\) at \S+job_script.py:\d+{}\n"
    for worker in ended:
        then = "; then RuntimeError: Array has been deleted" if worker.rank == 2 else ""
        assert re.fullmatch(said.format(worker.rank, then), worker.output), report(ended)
        # By the interrupt, or because the interpreter took too long to end on a busy machine.
        assert worker.code in (-2, 1, 130, -14), report(ended)


def test_ctrl_c_ends_the_job_soon(jobs):
    ended = jobs["one_is_interrupted"].join(SLACK)
    interrupted = r"\[worker 1/3\] interrupted \(Ctrl-C\) at \S+:\d+\na file that is not closed\n"
    assert re.fullmatch(interrupted, ended[1].output), report(ended)
    assert ended[1].code == -signal.SIGALRM, report(ended)
    for worker in (ended[0], ended[2]):
        waited = rf"\[worker {worker.rank}/3\] worker 1 .* is lost: it ended with Ctrl-C. "
        waited += r"This worker was waiting at \S+job_script.py:\d+\.\n"
        assert re.fullmatch(waited, worker.output), report(ended)
        assert worker.code == LOST, report(ended)


def test_the_chief_writes_what_all_save(jobs):
    ended = jobs["save"].join(SLACK)
    assert [worker.code for worker in ended] == [0, 0, 0], report(ended)
    told = [json.loads(worker.output.partition("saves ")[2]) for worker in ended[1:]]
    first, last = {"of": "all", "step": 0}, {"of": "all", "step": 3}
    own = {}  # the worker writes it
    assert told[0] == [first, first, own, own, last, own], report(ended)
    assert told[1] == [first, first, own, own, last], report(ended)


@pytest.mark.parametrize(
    ("behaviour", "code"), [("exit_with_3", 3), ("exit_with_a_message", 1), ("exit_with_0", 0)]
)
def test_a_worker_that_ends_by_itself_has_its_own_exit_code(jobs, behaviour, code):
    ended = jobs[behaviour].join(SLACK)
    assert ended[1].code == code, report(ended)
    if behaviour == "exit_with_a_message":
        assert ended[1].output.strip() == "no more data", report(ended)
    else:
        assert re.search(_left_early("'"), ended[1].output), report(ended)


def test_another_version_of_kerasdist_ends_the_job(workers):
    here, there = job_of(2)
    older = beside("-c", OLDER, "end_well", rank=1, seconds=SLACK, **there)
    ended = [*workers.begin(["end_well"], [here]).join(SLACK), older.result()]
    said = f"kerasdist='0.0.1' on worker 1, '{kerasdist.__version__}' on worker"
    require(ended, 1, f"DisagreementError.*versions. Received: {said}")


def test_all_workers_record_collectives_or_none(workers):
    environments = job_of(2)
    for one, records in zip(environments, ("1", "0"), strict=True):
        one["KERASDIST_DEBUG_COLLECTIVES"] = records
    ended = workers.begin(["wait_at_exit"], environments).join(SLACK)
    require(ended, 1, "DisagreementError.*KERASDIST_DEBUG_COLLECTIVES=0 on worker 1, 1 on worker 0")
