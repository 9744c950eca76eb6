"""A worker of a job that a launcher has started, and of which one fails; no framework is needed.

kerasdist run --workers 2 -m tests.multiprocess.launched_script RANK DEED [SECONDS]
"""

import atexit
import os
import signal
import sys
import time

from kerasdist.cluster import detect
from kerasdist.job.job import Job
from kerasdist.job.protocol import Timeouts


def exit_with_3():
    sys.exit(3)


def raise_an_error():
    raise KeyError("a mistake of the user's")


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def main():
    place = detect().membership()
    fails = place.rank == int(sys.argv[1])
    if fails:
        # What came before the job is cleaned up after it: so a framework keeps a worker from its
        # end.
        atexit.register(time.sleep, float(sys.argv[3]))
    job = Job(place, {}, Timeouts.of_environment())
    job.after_connecting()
    job.all_gather_object("step 1", None)
    if fails:
        globals()[sys.argv[2]]()
    job.all_gather_object("step 2", None)


if __name__ == "__main__":
    main()
