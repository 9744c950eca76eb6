"""A pytest plugin for Keras's own tests: every test runs inside a strategy's scope.

Used by ``tests.keras_suites.suite`` in a fresh process per backend::

    KERAS_BACKEND=jax KERASDIST_CPU_DEVICES=2 python -m pytest \
        -p tests.keras_suites.plugin --pyargs keras.src.trainers.trainer_test

With ``KERAS_SUITES_REPLICAS=0`` no scope is entered and kerasdist is not imported: that is
plain Keras. Each outcome is written to the file that
``KERAS_SUITES_OUTCOMES`` names as soon as it is known, so that a run that is killed still shows
where.
"""

import contextlib
import faulthandler
import functools
import gc
import json
import os
import sys
import zlib
from pathlib import Path

import pytest

from tests.keras_suites.suite import HALVED

REPLICAS = int(os.environ.get("KERAS_SUITES_REPLICAS", "2"))
OUTCOMES = os.environ.get("KERAS_SUITES_OUTCOMES")
SECONDS_PER_TEST = float(os.environ.get("KERAS_SUITES_SECONDS_PER_TEST", "300"))
# A copy of stderr: pytest's capture would swallow the tracebacks of a test that hangs.
STDERR = os.fdopen(os.dup(2), "w")


def pytest_configure():
    """Makes the devices before a test's module is imported, which may start the backend."""
    if REPLICAS:
        import kerasdist as kd

        kd.config.set_logical_cpu_devices(REPLICAS)


def short_id(nodeid: str) -> str:
    """``trainers/trainer_test.py::TestTrainer::test_fit``: where Keras is installed differs."""
    return nodeid.rpartition("keras/src/")[2]


def record(**line):
    if OUTCOMES:
        with Path(OUTCOMES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def is_wanted(test: str, wanted: list[str]) -> bool:
    """Whether a test is one of ``wanted``: files, or beginnings of tests' names."""
    return not wanted or any(test.startswith(one) for one in wanted)


def is_in_half(test: str, half: int | None) -> bool:
    """Whether a test is in the wanted half of the file that is halved; all others are."""
    return half is None or not test.startswith(HALVED) or zlib.crc32(test.encode()) % 2 == half


def pytest_collection_modifyitems(config, items):
    """Leaves out what is not selected, and what an earlier process has run already."""
    path = os.environ.get("KERAS_SUITES_CHOICE")
    choice = json.loads(Path(path).read_text("utf-8")) if path else {}
    known, wanted = set(choice.get("known", ())), choice.get("wanted", [])
    names = {item: short_id(item.nodeid) for item in items}
    left = [
        item
        for item, name in names.items()
        if name not in known and is_wanted(name, wanted) and is_in_half(name, choice.get("half"))
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(left)])
    items[:] = left


def pytest_collection_finish():
    """The frameworks' own objects, and most of what is traced, stay: that is not looked through."""
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """A hard limit per test: the stacks of all threads are printed and the process ends."""
    record(test=short_id(item.nodeid), outcome="started")
    faulthandler.dump_traceback_later(SECONDS_PER_TEST, exit=True, file=STDERR)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Opens the scope in the `setUp` of Keras's tests, around a test where it has none.

    It is after what Keras's own `setUp` does: that clears the session, and with it TensorFlow's
    graph, which holds the scope. Models that a test's own `setUp` makes are made in it.
    """
    if not REPLICAS:
        return (yield)
    from keras.src.testing import TestCase

    import kerasdist as kd

    test, set_up = item.obj, TestCase.setUp
    with contextlib.ExitStack() as scopes:

        def enter():
            strategy = kd.MirroredStrategy([f"cpu:{i}" for i in range(REPLICAS)])
            scopes.enter_context(strategy.scope())

        def set_up_in_scope(case):
            set_up(case)
            enter()

        @functools.wraps(test)
        def in_scope(*arguments, **options):
            if not kd.has_strategy():
                enter()
            with scopes:
                return test(*arguments, **options)

        item.obj, TestCase.setUp = in_scope, set_up_in_scope
        try:
            return (yield)
        finally:
            item.obj, TestCase.setUp = test, set_up


def pytest_collectreport(report):
    """A file that cannot be imported counts as one failed test."""
    if report.failed:
        name = short_id(report.nodeid) + "::(import)"
        record(test=name, outcome="failed", message=str(report.longrepr)[-4000:])


def pytest_runtest_logreport(report):
    if report.when != "call" and report.outcome == "passed":
        return
    if report.when == "teardown" and report.outcome == "skipped":
        return
    message = "" if report.outcome != "failed" else report.longreprtext[-4000:]
    record(
        test=short_id(report.nodeid),
        outcome=report.outcome,
        seconds=round(report.duration, 2),
        message=message,
    )


def pytest_sessionfinish(session, exitstatus):
    record(test="", outcome="finished", exitstatus=int(exitstatus))
    sys.stdout.flush()
