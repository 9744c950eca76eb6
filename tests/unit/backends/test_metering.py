"""What a meter makes of calls of the train function."""

import math
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from kerasdist.backends.base import metering
from kerasdist.backends.base.metering import Meter
from kerasdist.core.context import current


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is told to go on."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(metering.time, "perf_counter", lambda: now.seconds)
    yield now
    current.meter = None


def test_waits_and_steps_add_up_to_the_whole_time(clock):
    meter = Meter(knows_collectives=True, steps_ahead=1)
    window = meter.window(math.inf, print)
    meter.on_epoch_begin(0)

    def slow_batches():
        for samples in (8, 8, 2):
            clock.seconds += 0.25
            yield samples

    for samples in meter.timed(slow_batches()):
        clock.seconds += 0.75
        with metering.waiting_for_workers():
            clock.seconds += 0.5
        meter.done(1, samples)
    clock.seconds += 0.5  # the end of the epoch waits for the device
    meter.on_epoch_end(0)
    clock.seconds += 1000.0  # validation
    figures = window.take()
    assert (figures.steps, figures.samples, figures.seconds) == (3, 18, 5.0)
    assert (figures.data, figures.collectives, figures.own) == (0.75, 1.5, 3.5)
    assert figures.step_seconds == [1.5, 1.5, 1.5]
    again = window.take()
    assert (again.steps, again.samples, again.seconds) == (0, 0, 0.0)


def test_a_thread_has_a_meter_of_its_own(clock):
    """The steps and waits of a `fit` in another thread are not counted to this one's."""
    first, second = (Meter(knows_collectives=True, steps_ahead=1) for _ in range(2))
    windows = [one.window(math.inf, print) for one in (first, second)]

    def fit_beside():
        assert current.meter is None
        second.on_epoch_begin(0)
        with metering.waiting_for_workers():
            clock.seconds += 4.0
        second.done(1, 8)
        second.on_epoch_end(0)

    first.on_epoch_begin(0)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(fit_beside).result()
        assert current.meter is first
        assert pool.submit(lambda: current.meter).result() is None
    first.done(1, 2)
    first.on_epoch_end(0)
    figures = [window.take() for one, window in zip((first, second), windows, strict=True)]
    assert [(one.samples, one.collectives) for one in figures] == [(2, 0.0), (8, 4.0)]


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        # The host starts three steps at once, and waits in the fourth.
        ([(0.0, 1, 1), (0.0, 1, 1), (0.0, 1, 1), (4.0, 1, 1)] * 2, [1.0, 1.0]),
        # What is left over joins the last group.
        ([(1.0, 1, 1)] * 6, [1.0]),
        ([(2.0, 1, 1)] * 3, [2.0]),
        # A call of more steps than a group is one.
        ([(8.0, 8, 1), (16.0, 8, 1)], [1.0, 2.0]),
        ([], []),
    ],
)
def test_steps_that_the_host_starts_ahead_count_as_one(clock, calls, expected):
    meter = Meter(knows_collectives=False, steps_ahead=4)
    window = meter.window(math.inf, print)
    meter.on_epoch_begin(0)
    for seconds, steps, samples in calls:
        clock.seconds += seconds
        meter.done(steps, samples)
    assert window.take().step_seconds == expected
