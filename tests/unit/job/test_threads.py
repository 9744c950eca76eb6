"""Threads that do not interrupt others when they wake."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kerasdist.job import listening

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="these are Linux's classes")


def choose(scheduling_class: int) -> None:
    os.sched_setscheduler(0, scheduling_class, os.sched_param(0))


def own_class() -> int:
    return os.sched_getscheduler(0)


def in_a_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Returns what a function returns in a thread of its own, which takes its class with it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def classes(of_starter: int) -> tuple[int, int, int]:
    """A thread's own class in a block and after it, and that of one it starts in the block."""
    choose(of_starter)
    with listening.waiting_their_turn():
        inside, started = own_class(), in_a_thread(own_class)
    return inside, own_class(), started


def test_threads_that_start_in_the_block_wait_for_their_turn():
    _, after, started = in_a_thread(classes, os.SCHED_OTHER)
    assert started == os.SCHED_BATCH
    assert after == os.SCHED_OTHER
    # What the user has chosen stays.
    assert in_a_thread(classes, os.SCHED_IDLE) == (os.SCHED_IDLE,) * 3


def test_a_sandbox_that_forbids_it_changes_nothing(monkeypatch):
    def forbidden(scheduling_class: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(listening, "_choose", forbidden)
    assert in_a_thread(classes, os.SCHED_OTHER) == (os.SCHED_OTHER,) * 3
