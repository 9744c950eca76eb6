"""The threads of a strategy: one a replica, alive as long as the strategy.

Replica 0 runs in the thread that calls; the others in daemon threads that wait for the next step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, final

from kerasdist.backends.torch.rendezvous import Rendezvous, Stopped


@final
class Team:
    """Threads that take a step together. After an error it is spent: make another one."""

    def __init__(self, size: int, *, timeout: float) -> None:
        """Starts the threads.

        Args:
            size: How many replicas there are.
            timeout: How long a replica waits for the others, in seconds.
        """
        self.rendezvous = Rendezvous(size, timeout=timeout)
        self.spent = False
        self._closed = False
        self._work: Callable[[int], Any] | None = None
        self._results: list[Any] = [None] * size
        for rank in range(1, size):
            name = f"kerasdist-replica-{rank}"
            threading.Thread(target=self._serve, args=(rank,), name=name, daemon=True).start()

    def run(self, count: int, work: Callable[[int], Any], *, turns: bool) -> list[Any]:
        """Runs ``work(rank)`` for the first `count` replicas and returns what they returned.

        Args:
            count: How many replicas take part, at least 2.
            work: The step of one replica.
            turns: Whether they run one at a time (see `Rendezvous`).

        Returns:
            One result a replica, in the order of ranks.

        Raises:
            Exception: What the first replica that failed raised, with its traceback.
        """
        self.spent = True  # until proven otherwise, an interrupt can come at any time
        self._work = work
        try:
            self.rendezvous.begin(count, turns=turns)
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
        """Ends the threads, as soon as they have ended what they do."""
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
        except BaseException as raised:  # noqa: BLE001  it comes out in the calling thread
            raised.add_note(f"Raised in replica {rank}.")
            error = raised
        self.rendezvous.finish(rank, error)
