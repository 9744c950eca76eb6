"""Threads that do not interrupt others when they wake."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from kerasdist.job import listening

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="these are Linux's classes")


def in_a_thread(function, *args):
    """Returns what a function returns in a thread of its own, which takes its class with it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def classes(of_starter):
    """A thread's own class in a block and after it, and that of one it starts in the block."""
    os.sched_setscheduler(0, of_starter, os.sched_param(0))
    with listening.waiting_their_turn():
        inside, started = os.sched_getscheduler(0), in_a_thread(os.sched_getscheduler, 0)
    return inside, os.sched_getscheduler(0), started


def test_threads_that_start_in_the_block_wait_for_their_turn(monkeypatch):
    _, after, started = in_a_thread(classes, os.SCHED_OTHER)
    assert (after, started) == (os.SCHED_OTHER, os.SCHED_BATCH)
    # What the user has chosen stays.
    assert in_a_thread(classes, os.SCHED_IDLE) == (os.SCHED_IDLE,) * 3

    def forbidden(scheduling_class):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(listening, "_choose", forbidden)  # in a sandbox
    assert in_a_thread(classes, os.SCHED_OTHER) == (os.SCHED_OTHER,) * 3
