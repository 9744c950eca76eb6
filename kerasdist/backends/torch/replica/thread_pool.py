"""The threads of a strategy in a process: one per replica, alive as long as the strategy.

Replica 0 runs in the calling thread, the others in daemon threads that wait for the next step.
The threads take turns (`kerasdist.backends.torch.replica.rendezvous`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, final

from kerasdist.backends.base import metering
from kerasdist.backends.torch.replica.rendezvous import Rendezvous, Stopped


@final
class ThreadPool:
    """Threads that run a step together. After an error (`spent`) the caller makes a new pool."""

    def __init__(self, size: int, *, timeout: float) -> None:
        """Starts the threads."""
        self.rendezvous = Rendezvous(size, timeout=timeout)
        self.spent = False
        self._closed = False
        self._work: Callable[[int], Any] | None = None
        self._results: list[Any] = [None] * size
        for rank in range(1, size):
            name = f"kerasdist-replica-{rank}"
            threading.Thread(target=self._serve, args=(rank,), name=name, daemon=True).start()

    def run(self, count: int, work: Callable[[int], Any]) -> list[Any]:
        """Runs ``work(rank)`` for the first `count` replicas; returns their results by rank."""
        self.spent = True  # until the step has succeeded: an interrupt can come at any time
        self._work = metering.measure_alike(work)
        try:
            self.rendezvous.begin(count)
            self._take_part(0)
            error = self.rendezvous.broken
            if error is not None:
                raise error
            results = self._results[:count]
        finally:
            self._work = None
            self._results = [None] * len(self._results)
        self.spent = False
        return results

    def close(self) -> None:
        """Ends the threads, each as soon as its current step has ended."""
        self._closed = True
        for gate in self.rendezvous.gates[1:]:
            if gate.locked():
                gate.release()

    def _serve(self, rank: int) -> None:
        gate = self.rendezvous.gates[rank]
        while True:
            gate.acquire()
            if self._closed:
                return
            self._take_part(rank)

    def _take_part(self, rank: int) -> None:
        error = None
        try:
            self.rendezvous.check()
            self._results[rank] = self._work(rank)  # type: ignore[misc]
        except Stopped as stop:
            error = stop
        except BaseException as raised:  # noqa: BLE001  `run` raises it in the calling thread
            if len(self._results) > 1:
                raised.add_note(f"Raised in replica {rank}.")
            error = raised
        self.rendezvous.finish(rank, error)
