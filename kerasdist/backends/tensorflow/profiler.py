"""TensorFlow's profiler."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, final

import tensorflow as tf

from kerasdist.backends.base.interface import Event, Profiler

# The description of XPlane files; it has no public name.
_XPLANE = "tensorflow.tsl.profiler.protobuf.xplane_pb2"


@final
class TensorFlowProfiler(Profiler):
    """TensorFlow writes XPlane files alone; their format comes with TensorFlow, and is read here.

    TensorBoard's profile plug-in, which converts them too, is another package with another server.
    """

    def start(self, folder: Path) -> None:
        """Starts to record."""
        tf.profiler.experimental.start(str(folder))

    def marked(self, name: str) -> AbstractContextManager[Any]:
        """Returns a context that is an event of this name."""
        return tf.profiler.experimental.Trace(name)

    def stop(self, folder: Path) -> Iterable[Event]:
        """Stops, and returns the events."""
        tf.profiler.experimental.stop()
        for path in folder.rglob("*.xplane.pb"):
            yield from _events_of(path)


def _events_of(path: Path) -> Iterator[Event]:
    """Yields the events of an XPlane file: a process for each plane, a thread for each line."""
    space = importlib.import_module(_XPLANE).XSpace()
    space.ParseFromString(path.read_bytes())
    for process, plane in enumerate(space.planes):
        yield _name("process_name", process, 0, plane.name)
        for thread, line in enumerate(plane.lines):
            yield _name("thread_name", process, thread, line.display_name or line.name)
            for event in line.events:
                known = plane.event_metadata[event.metadata_id]
                yield {
                    "ph": "X",
                    "pid": process,
                    "tid": thread,
                    "name": known.display_name or known.name,
                    "ts": line.timestamp_ns / 1e3 + event.offset_ps / 1e6,
                    "dur": event.duration_ps / 1e6,
                }


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
