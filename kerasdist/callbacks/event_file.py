"""Event files, from which TensorBoard draws curves; written by the package tensorboard alone."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

_PACKAGE = "tensorboard"


def is_possible() -> bool:
    """Returns whether the package tensorboard is installed."""
    return importlib.util.find_spec(_PACKAGE) is not None


@final
class EventFile:
    """A new event file. It needs no TensorFlow, and imports none.

    Args:
        folder: Its folder, made if there is none.
    """

    def __init__(self, folder: Path) -> None:
        # tensorboard's own EventFileWriter would import TensorFlow where that is installed.
        self._messages: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        records: Any = importlib.import_module("tensorboard.summary.writer.record_writer")
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{platform.node()}.{os.getpid()}.kerasdist"
        self._writer = records.RecordWriter((folder / name).open("wb"))
        self._write(self._messages.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a point to the curve of each value."""
        event = self._messages.Event(wall_time=time.time(), step=step)
        for name, value in values.items():
            event.summary.value.add(tag=name, simple_value=value)
        self._write(event)

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()
