"""Traces of several workers, by one clock in one file."""

import gzip
import json

import pytest

from kerasdist.callbacks.profile import aligned, offset_of_stamps
from kerasdist.cli.launch import traces
from kerasdist.errors import JobError
from kerasdist.job.launcher import parsed, wanted


def test_which_steps(tmp_path):
    steps = parsed("10:20", tmp_path)
    assert (steps.first, steps.last) == (10, 20)
    assert wanted(steps.variables) == steps
    assert wanted({}) is None
    for bad in ("10", "0:3", "5:5", "7:5", "a:b", "1:2:3"):
        with pytest.raises(ValueError, match="expected FIRST:LAST"):
            parsed(bad, tmp_path)


def test_events_get_the_chiefs_clock():
    """The mark was made at 5,000 µs by this machine's clock, which is 1,000 µs ahead."""
    events = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "host"}},
        {"ph": "X", "name": "kerasdist clock 5000000", "ts": 40.0, "dur": 1.0},
        {"ph": "X", "name": "work", "ts": 60.0, "dur": 7.0},
    ]
    moved = aligned(events, 1000.0)
    assert [one.get("ts") for one in moved] == [None, 4020.0]
    assert events[2]["ts"] == 60.0
    with pytest.raises(JobError, match=r"mark of the clock.*1 events"):
        aligned(events[:1], 0.0)


def test_the_offset_of_a_clock_is_the_median_of_the_rounds():
    chiefs = [1000 * number for number in range(9)]
    own = [stamp + 50_000 for stamp in chiefs]
    own[3] += 900_000  # a message that came late
    assert offset_of_stamps(own, chiefs).microseconds == 50.0
    assert offset_of_stamps(own, chiefs).spread == 0.0


def trace_of(worker, events):
    return {"traceEvents": events, "kerasdist": {"worker": worker, "host": f"host{worker}"}}


EVENTS = [
    {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "CPU"}},
    {"ph": "M", "name": "thread_name", "pid": 7, "tid": 70, "args": {"name": "main"}},
    {"ph": "X", "name": "a", "pid": 7, "tid": 70, "ts": 1500.0, "dur": 2.0},
    {"ph": "X", "name": "b", "pid": 7, "tid": 71, "ts": 1600.0, "dur": 2.0},
    {"ph": "s", "name": "link", "id": 3, "pid": 7, "tid": 70, "ts": 1501.0},
    {"ph": "X", "name": "c", "pid": "rows", "tid": 70, "ts": 1700.0, "dur": 2.0},
]


def test_the_file_and_what_is_said_of_it(tmp_path):
    steps = parsed("1:2", tmp_path / "out")
    assert "no worker has written a profile" in traces.merge(steps, 2)
    steps.folder.mkdir()
    steps.of_worker(1).write_bytes(gzip.compress(json.dumps(trace_of(1, EVENTS)).encode()))
    said = traces.merge(steps, 2)
    assert "ui.perfetto.dev" in said
    assert "lacks worker 0" in said
    with gzip.open(steps.folder / traces.MERGED) as file:
        assert json.load(file)["traceEvents"] == traces.merged([trace_of(1, EVENTS)])
    traces.forget_old(steps)
    assert list(steps.folder.iterdir()) == []
