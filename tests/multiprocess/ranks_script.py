"""A script that starts the other ranks of itself, without a framework: rank 0 of two workers.

ranks_script.py DEED [ARGUMENTS]: all ranks join the job, and do the deed; each leaves a file
``ready-RANK`` with its process number in the folder MARKS.
"""

import os
import sys
import time
from pathlib import Path

from kerasdist.cli.launch.ranks import Ranks
from kerasdist.cluster import detect
from kerasdist.cluster.kerasdist_variables import RANK
from kerasdist.errors import JobError
from kerasdist.job.job import join_job
from kerasdist.strategies.processes import command

SECONDS = 60


def say(line):
    """Writes a line at once; unbuffered, `print` lets another rank's line between its parts."""
    sys.stdout.write(f"{line}\n")


def nothing(job):
    pass


def tell(job):
    say(f"told {job.rank} {sys.argv[1:]} {__name__}")


def exit_with_3(job):
    sys.exit(3)


def one_exits_with_3(job):
    if job.rank == 1:
        sys.exit(3)


def one_raises(job):
    if job.rank == 1:
        raise KeyError("a mistake of the user's")
    job.all_gather_object("what never comes", None)


def chief_raises(job):
    if job.rank == 0:
        raise KeyError("a mistake of the user's")
    job.all_gather_object("what never comes", None)


def sleep(job):
    time.sleep(SECONDS)


def wait_for_others(job):
    if job.rank == 1:
        time.sleep(SECONDS)
    job.all_gather_object("what never comes", None)


def catch(job):
    try:
        time.sleep(SECONDS)
    except KeyboardInterrupt:
        say(f"caught {job.rank}")
    job.all_gather_object("goes on", None)


def fork(job):
    """A process that the chief forks holds a copy of all that the chief has open."""
    if job.rank == 0 and os.fork() == 0:
        mark("forked")
        time.sleep(SECONDS)
        os._exit(0)
    time.sleep(SECONDS)


def mark(name):
    folder = Path(os.environ["MARKS"])
    (folder / f"{name}.new").write_text(str(os.getpid()))
    (folder / f"{name}.new").rename(folder / name)


def main():
    started = None
    if RANK not in os.environ:
        started = Ranks(command(), ["cpu:0", "cpu:0"], {"MINE": "1"})
    elif sys.argv[1] == "fail_early":
        sys.exit("no data here")
    elif sys.argv[1] == "end_early":
        return
    try:
        job, _ = join_job(detect().membership(), {})
    except JobError:
        sys.exit("kept from its end")
    job.after_connecting()
    if started is not None:
        started.pass_on_interrupts()
    job.all_gather_object("all are here", None)
    mark(f"ready-{job.rank}")
    globals()[sys.argv[1]](job)


if __name__ == "__main__":
    main()
