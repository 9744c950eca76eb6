"""A task: it meets the other tasks as a strategy does, and then obeys its first argument."""

import os
import signal
import sys
import time
from pathlib import Path

from kerasdist.cluster import detect
from kerasdist.job.interruption import ExitCode
from kerasdist.job.job import join_job

FOLDER = Path(os.environ["SLURM_STANDS_IN"])


def wait_for_the_signal(job):
    """As `kerasdist.experimental.preempt` does: all leave, with the exit code that says so."""
    if os.environ.get("SLURM_RESTART_COUNT"):
        return
    told = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    (FOLDER / f"ready-{job.rank}").touch()
    while not told:
        time.sleep(0.02)
    job.all_gather_object("backup", None)
    sys.exit(ExitCode.PREEMPTED)


def be_killed_the_first_time(job):
    if os.environ["KERASDIST_RESTART"] == "0":
        if job.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        job.all_gather_object("the next step", None)


def main():
    job, _ = join_job(detect().membership(), {"keras": "1"})
    job.after_connecting()
    place = job.membership
    ranks = job.all_gather_object("ranks", job.rank)
    globals()[sys.argv[1]](job)
    facts = [place.source, ranks, place.local_rank, place.local_workers, *sys.argv[2:]]
    print(f"{facts} threads={os.environ['OMP_NUM_THREADS']}", flush=True)


if __name__ == "__main__":
    main()
