"""A worker's reports to the launcher: where its training is."""

from __future__ import annotations

import contextlib
import json
import os
import select
from collections.abc import Mapping
from functools import cache
from typing import Any, final

FILE_DESCRIPTOR = "KERASDIST_STATUS_FD"
"""The number of a pipe that a worker writes its reports to; the launcher sets it."""


@final
class Channel:
    """Writes reports, each a line of JSON, and never waits: a report may be dropped."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # a data loader's processes have no part in it
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor

    def tell(self, report: Mapping[str, Any]) -> None:
        """Sends a report, unless the launcher is gone or does not read."""
        line = f"{json.dumps(report)}\n".encode()
        if len(line) > select.PIPE_BUF:  # the pipe may split longer lines
            return
        with contextlib.suppress(OSError):
            os.write(self._descriptor, line)


@cache
def channel() -> Channel | None:
    """Returns the channel to the launcher, None where there is none or it wants no reports."""
    given = os.environ.get(FILE_DESCRIPTOR, "")
    if not given.isdecimal():
        return None
    try:
        return Channel(int(given))
    except OSError:  # a process that the worker has started, without its files
        return None
