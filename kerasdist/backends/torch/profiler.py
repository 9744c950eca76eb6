"""PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, final

import torch

from kerasdist.backends.base.profiler import Event, Profiler, read_chrome_trace

_FILE = "torch.json"


@final
class TorchProfiler(Profiler):
    """Records operations on the host and, where there are any, kernels on GPUs."""

    def __init__(self) -> None:
        self._profile: Any = None

    def start(self, folder: Path) -> None:
        """Starts to record."""
        del folder
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=kinds)
        self._profile.start()

    def marked(self, name: str) -> AbstractContextManager[Any]:
        """Returns a context that is an event of this name."""
        return torch.profiler.record_function(name)

    def stop(self, folder: Path) -> Iterable[Event]:
        """Waits for the devices, stops, and returns the events."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.stop()
        self._profile.export_chrome_trace(str(folder / _FILE))
        return read_chrome_trace(folder / _FILE)
