"""JAX's profiler."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, final

import jax

from kerasdist.backends.base.profiler import Event, Profiler, read_chrome_trace


@final
class JaxProfiler(Profiler):
    """Writes XLA's own files, of which the one in Chrome's format is read."""

    def start(self, folder: Path) -> None:
        """Starts to record."""
        jax.profiler.start_trace(folder)

    def marked(self, name: str) -> AbstractContextManager[Any]:
        """Returns a context that is an event of this name."""
        return jax.profiler.TraceAnnotation(name)

    def stop(self, folder: Path) -> Iterable[Event]:
        """Stops, and returns the events."""
        jax.profiler.stop_trace()
        for path in folder.rglob("*.trace.json.gz"):
            yield from read_chrome_trace(path)
