"""The frameworks' own profilers: what each worker did in some steps, as events with times."""

from __future__ import annotations

import abc
import gzip
import json
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

# An event of Chrome's trace format, with ``ts`` and ``dur`` in microseconds.
Event = dict[str, Any]


class Profiler(abc.ABC):
    """Records what the process and its devices do."""

    @abc.abstractmethod
    def start(self, folder: Path) -> None:
        """Starts to record.

        Args:
            folder: An empty folder for the framework's own files.
        """

    @abc.abstractmethod
    def marked(self, name: str) -> AbstractContextManager[Any]:
        """Returns a context that is an event of this name.

        Args:
            name: The name.
        """

    @abc.abstractmethod
    def stop(self, folder: Path) -> Iterable[Event]:
        """Stops, and returns the events, by the profiler's own clock.

        Args:
            folder: That of `start`.
        """


def read_chrome_trace(path: Path) -> list[Event]:
    """Returns the events of a file in Chrome's trace format, compressed or not."""
    content = path.read_bytes()
    trace = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    return [one for one in trace["traceEvents"] if "ph" in one]  # XLA's last one is empty
