"""A pytest plugin for Keras's own tests: every test runs inside a strategy's scope.

Used by ``tests.keras_suites.suite`` in a fresh process per backend. With no replicas no scope is
entered and kerasdist is not imported: that is plain Keras. Each outcome is written as soon as it is
known, so that a run that is killed still shows where.
"""

import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import re
import sys
import zlib
from pathlib import Path

import pytest

from tests.keras_suites.suite import CHOICE, HALVED, SECONDS_PER_TEST

_CHOICE = json.loads(Path(os.environ[CHOICE]).read_text("utf-8"))
REPLICAS, OUTCOMES = _CHOICE["replicas"], Path(_CHOICE["outcomes"])
KNOWN, WANTED, HALF = set(_CHOICE["known"]), tuple(_CHOICE["wanted"]), _CHOICE["half"]
# A copy of stderr: pytest's capture would swallow the tracebacks of a test that hangs.
STDERR = os.fdopen(os.dup(2), "w")


def pytest_configure():
    """Makes the devices before a test's module is imported, which may start the backend."""
    if REPLICAS:
        import kerasdist as kd

        kd.config.set_logical_cpu_devices(REPLICAS)
    make_models_of_tests()


def make_models_of_tests():
    """Lets tests of trainers make models: theirs mix a layer and Keras's trainer, not public."""
    import keras

    backend = keras.backend.backend()
    trainers = importlib.import_module(f"keras.src.backend.{backend}.trainer")
    names = [
        name for name in vars(trainers) if re.fullmatch("(JAX|TensorFlow|Torch|)Trainer", name)
    ]
    [own] = (getattr(trainers, name) for name in names)

    class Trainer(keras.Model):
        def __init__(self):
            own.__init__(self)  # the layer has begun already

        def __init_subclass__(cls):
            """Gives a class the `build` and `call` of the layer, which stands behind the model."""
            layers = [one for one in cls.__mro__ if not issubclass(one, keras.Model)]
            for name in {"build", "call"} - vars(cls).keys():
                if cls.__bases__[0] is Trainer:
                    found = next(one for one in layers if name in vars(one))
                    setattr(cls, name, vars(found)[name])

    setattr(trainers, names[0], Trainer)


def short_id(nodeid: str) -> str:
    """``trainers/trainer_test.py::TestTrainer::test_fit``: where Keras is installed differs."""
    return nodeid.rpartition("keras/src/")[2]


def record(**line):
    with OUTCOMES.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def is_chosen(test: str) -> bool:
    """Whether a test is wanted, in the wanted half, and not one that an earlier process has run."""
    halved = HALF is not None and test.startswith(HALVED)
    return (
        test not in KNOWN
        and (not WANTED or test.startswith(WANTED))
        and (not halved or zlib.crc32(test.encode()) % 2 == HALF)
    )


def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if is_chosen(short_id(item.nodeid))]


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
    record(test=short_id(report.nodeid), outcome=report.outcome, message=message)


def pytest_sessionfinish(session, exitstatus):
    record(test="", outcome="finished", exitstatus=int(exitstatus))
    sys.stdout.flush()
