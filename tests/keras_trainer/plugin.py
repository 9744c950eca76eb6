"""A pytest plugin for Keras's own trainer tests: every test runs inside a strategy's scope.

Used by ``tests.keras_trainer.suite`` in a fresh process a backend::

    KERAS_BACKEND=jax KERASDIST_CPU_DEVICES=2 python -m pytest \
        -p tests.keras_trainer.plugin --pyargs keras.src.trainers.trainer_test

With ``KERAS_TRAINER_REPLICAS=0`` no scope is entered and kerasdist is not imported: that is
plain Keras, whose outcomes ``plain.json`` holds. Outcomes go, test by test as they come, to the
file that ``KERAS_TRAINER_OUTCOMES`` names, so that a run that is killed still tells where.
"""

import faulthandler
import functools
import gc
import json
import os
import sys
from pathlib import Path

import pytest

REPLICAS = int(os.environ.get("KERAS_TRAINER_REPLICAS", "2"))
OUTCOMES = os.environ.get("KERAS_TRAINER_OUTCOMES")
SECONDS_PER_TEST = float(os.environ.get("KERAS_TRAINER_SECONDS_PER_TEST", "120"))
# Our own copy of stderr: pytest's capture would swallow the tracebacks of a test that hangs.
STDERR = os.fdopen(os.dup(2), "w")


def short_id(nodeid: str) -> str:
    """``TestTrainer::test_fit``: without the path of the installed Keras, which differs."""
    return nodeid.split("::", 1)[1]


def record(**line):
    if OUTCOMES:
        with Path(OUTCOMES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def pytest_collection_modifyitems(config, items):
    """Leaves out what an earlier process, which a test has ended, has told of already."""
    path = os.environ.get("KERAS_TRAINER_KNOWN")
    known = set(json.loads(Path(path).read_text("utf-8"))) if path else set()
    left = [item for item in items if short_id(item.nodeid) not in known]
    config.hook.pytest_deselected(items=[item for item in items if item not in left])
    items[:] = left


def pytest_collection_finish():
    """The frameworks' own objects, and most of what is traced, stay: that is not looked through."""
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """A hard limit a test: the stacks of all threads are printed and the process ends."""
    record(test=short_id(item.nodeid), outcome="started")
    faulthandler.dump_traceback_later(SECONDS_PER_TEST, exit=True, file=STDERR)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """The scope is around the test alone: Keras's ``setUp`` clears the session, and with it
    TensorFlow's graph, which holds the scope."""
    if not REPLICAS:
        return (yield)
    import kerasdist as kd

    test = item.obj

    @functools.wraps(test)
    def in_scope(*arguments, **options):
        with kd.MirroredStrategy([f"cpu:{i}" for i in range(REPLICAS)]).scope():
            return test(*arguments, **options)

    item.obj = in_scope
    try:
        return (yield)
    finally:
        item.obj = test


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
