"""One worker of a job without any framework: joins, does what its name says, and ends.

python -m tests.multiprocess.job_script                        waits for orders (see `forks`)
python -m tests.multiprocess.job_script BEHAVIOUR [SECONDS]    the environment says which worker

SECONDS: for how long a worker that is alone in what it does is kept from its end.
"""

import atexit
import ctypes
import json
import os
import signal
import subprocess
import sys
import time

from kerasdist.cluster import detect
from kerasdist.errors import DisagreementError, WorkerLostError
from kerasdist.job.comparison import BatchHistory
from kerasdist.job.job import Job
from kerasdist.job.protocol import Timeouts
from tests.multiprocess.forks import wait_to_be_one

LONG = 60.0
HEARTBEAT, MEETING, JOIN = 2.0, 3.0, 4.0
# Short only where a limit is what ends the job: a busy machine does not keep the others.
SHORT = {
    "be_stopped": {"heartbeat": HEARTBEAT},
    "all_are_suspended": {"heartbeat": HEARTBEAT},
    "hang_in_other_batches": {"heartbeat": HEARTBEAT},
    "stay_away": {"meeting": MEETING},
    "stand_still": {"meeting": MEETING},
    "stand_still_in_other_collectives": {"meeting": MEETING},
    "chief_does_not_save": {"meeting": MEETING},
    "never_come": {"join": JOIN},
}


def joined(behaviour: str) -> Job:
    if behaviour == "stand_still_in_other_collectives":
        os.environ["KERASDIST_DEBUG_COLLECTIVES"] = "1"
    limits = {"join": LONG, "heartbeat": LONG, "meeting": LONG, **SHORT.get(behaviour, {})}
    job = Job(detect().membership(), {"keras": "1"}, Timeouts(**limits))
    if behaviour != "end_before_connecting":
        job.after_connecting()
    return job


def end_before_connecting(job: Job):
    """As after a caught error: the chief waits for the others."""
    time.sleep(0 if job.is_chief else 1)
    job.check()


def end_well(job: Job):
    everyone = [job.all_gather_object(f"step {step}", [job.rank, step]) for step in range(50)]
    assert everyone == [[[r, step] for r in range(job.num_workers)] for step in range(50)]
    gathered = job.gather_object("of all, for the chief", {"rank": job.rank})
    assert gathered == ([{"rank": r} for r in range(job.num_workers)] if job.is_chief else [])
    assert job.compare_objects("halves", [job.rank // 2]) == [0, 0, 1]
    assert job.broadcast_object("of the chief", job.rank) == 0
    try:
        job.assert_equal("halves", {"half": job.rank // 2})
    except DisagreementError as error:
        print("said", str(error).partition("] ")[2])
    print("addresses", *job.gather_addresses())


def wait_at_exit(job: Job):
    """The chief is slower to end; the others wait for it."""
    began = time.monotonic()
    if job.is_chief:
        time.sleep(1)
    job.leave()
    print("waited" if time.monotonic() - began > 0.9 else "did not wait")


def all_are_suspended(job: Job):
    """As by Slurm's suspend, for three times the heartbeat's time-out."""
    began = time.monotonic()
    pids = " ".join(map(str, job.all_gather_object("processes", os.getpid())))
    if job.is_chief:
        script = f"kill -STOP {pids}; sleep {3 * HEARTBEAT}; kill -CONT {pids}"
        subprocess.Popen(["sh", "-c", script])
    with job.translating_failures("fit"):
        while time.monotonic() - began < 6 * HEARTBEAT:
            time.sleep(0.05)
    print("went on", job.all_gather_object("after the pause", job.rank))


def disagree(job: Job):
    job.assert_equal("models", {"layers": 3, "units": 4 + job.rank})


def exit_with_a_message(job: Job):
    """Exits, by an exception of its own, during work that needs all workers."""
    with job.translating_failures("fit"):
        if job.rank == 1:
            raise SystemExit("no more data")
        time.sleep(LONG)


def exit_with_0(job: Job):
    """While another is in a step that does not end."""
    with job.translating_failures("fit"):
        job.step_started()
        if job.rank == 1:
            sys.exit(0)
        job.step_started()
        time.sleep(LONG)


def all_exit_with_3(job: Job):
    """The last worker exits while the others are ending; no worker leaves the others waiting."""
    try:
        sys.exit(4)
    except SystemExit:
        job.all_gather_object("that was caught", None)
    time.sleep(0.3 * job.rank)
    sys.exit(3)


def go_elsewhere(job: Job):
    job.all_gather_object("step 6" if job.rank == 1 else "end of epoch 1", None)


def stand_still(job: Job):
    """All workers are alive in a step that does not end; worker 1 is a step behind."""
    with job.translating_failures("fit"):
        for _ in range(3 - job.rank):
            job.step_started()
        time.sleep(LONG)


def stand_still_in_other_collectives(job: Job):
    """Each waits for the others in its own collective."""
    with job.translating_failures("fit"):
        job.step_started()
        for kind in ("all_reduce", "broadcast" if job.rank == 1 else "all_gather"):
            job.collectives.record(kind, "float32[4] in the group of all workers")
        time.sleep(LONG)


def hang_in_other_batches(job: Job):
    """In collectives that differ, where no step comes by which it would be found."""
    history = BatchHistory()
    job.report_batches(history.report)
    with job.translating_failures("fit"):
        for step in range(3):
            job.step_started()
            history.add(f"4 program {job.rank % 2}" if step == 2 else 6)
        time.sleep(LONG)


def save(job: Job):
    found = []

    def saves(path):
        if job.is_chief:
            job._client.wrote(path, {"of": path, "step": job._client.step})
        else:
            found.append(job._client.written_by_chief(path))

    saves("all")
    if job.is_chief:
        saves("the chief alone")
    saves("all")  # the second time in the same step
    job.step_started()
    saves(f"own {job.rank}")
    job.all_gather_object("a meeting", None)
    if job.rank == 1:
        saves("worker 1 alone, before a meeting")
    job.all_gather_object("a meeting", None)
    job.step_started()
    if job.rank == 2:
        saves("worker 2 alone, in the step before")
    job.step_started()
    saves("all")
    if job.rank == 1:
        saves("worker 1 alone, at the end")
    print("saves", json.dumps(found))


def all_are_interrupted(job: Job):
    """By Ctrl-C; on worker 2 a framework makes another error of it."""
    # A shell has its background jobs ignore SIGINT, and so whatever the tests are started from.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    job.all_gather_object("ready", None)
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        if job.rank == 2:
            raise RuntimeError("Array has been deleted")


class Framework:
    """What takes long to be taken apart, and holds Python's lock meanwhile."""

    def __init__(self):
        self._sleep = ctypes.PyDLL(None).sleep

    def __del__(self):
        self._sleep(60)


def one_is_interrupted(job: Job):
    """By Ctrl-C; the others are in a collective that no exception reaches."""
    with job.translating_failures("fit"):
        if job.rank != 1:
            time.sleep(LONG)
        left = os.fdopen(os.dup(1), "w", encoding="utf-8")
        left.write("a file that is not closed\n")
        LEFT.extend([Framework(), left])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)


LEFT: list[object] = []


def chief_does_not_save(job: Job):
    """It is alive, and elsewhere."""
    if job.is_chief:
        time.sleep(LONG)
    job.is_written_by_chief("/folder/m.keras")


def chief_fails_to_save(job: Job):
    """The others may learn of it first, and end; the chief is the one that failed."""
    if job.is_chief:
        time.sleep(0.5)
        raise PermissionError("/folder/m.keras")
    raise WorkerLostError("Expected worker 0 to save the model")


def broken_engine(job: Job):
    """A framework's error that a lost worker causes."""
    if job.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with job.translating_failures("fit"):
        time.sleep(0.3)
        raise RuntimeError("Connection closed by peer")


def never_come(job: Job):
    job.all_gather_object("the next step", None)


def own_error(job: Job):
    """An error of the user's stays what it is, also of a kind that frameworks raise."""
    with job.translating_failures("fit"):
        job.all_gather_object("all are here", None)
        raise ValueError("a mistake of the user's")


def fail():
    raise KeyError("a mistake of the user's")


# What one worker does alone, by its rank, while the others go on to the next step.
ALONE = {
    "be_killed": (1, lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "be_stopped": (1, lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    "chief_exits_with_3": (0, lambda: sys.exit(3)),
    "chief_is_killed": (0, lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "chief_raises_an_error": (0, fail),
    "exit_with_3": (1, lambda: sys.exit(3)),
    "raise_an_error": (1, fail),
    "stay_away": (1, lambda: time.sleep(LONG)),
}


def main():
    if not sys.argv[1:]:
        wait_to_be_one()
    name, *seconds = sys.argv[1:]
    rank = int(os.environ["KERASDIST_RANK"])
    alone, deed = ALONE.get(name, (None, None))
    if name == "never_come" and rank == 1:
        return
    if seconds and rank == alone:
        # What came before the job is cleaned up after it: so a framework keeps a worker from its
        # end.
        atexit.register(time.sleep, float(seconds[0]))
    job = joined(name)
    if deed is None:
        globals()[name](job)
        return
    if rank == alone:
        deed()
    job.all_gather_object("the next step", None)


if __name__ == "__main__":
    main()
