"""The rendezvous of a step's threads: each brings a value, the last combines, all get the result.

The file does not depend on a framework. A participant breaks the rendezvous if it raises, ends its
step while others wait, makes another call than they do, or does not arrive in time. Then every
participant that waits, or arrives later, gets a `ReplicaError`.

The participants take turns: only one runs at a time, from one meeting to the next, always in the
same order. So replicas can share the state that Keras's layers and torch keep once per process: a
layer's cached mask, torch's own generator, a layer that its first call builds.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

from kerasdist.errors import ReplicaError


@final
class Stopped(ReplicaError):  # noqa: N818  an order to stop, not the cause
    """This replica stops because the step was ended by another one."""


@final
class Rendezvous:
    """The meetings of up to `size` participants, step after step."""

    def __init__(self, size: int, *, timeout: float) -> None:
        self.timeout = timeout
        # A participant waits by acquiring its gate; another one lets it go on by releasing it.
        self.gates = [threading.Lock() for _ in range(size)]
        for gate in self.gates:
            gate.acquire()
        self._lock = threading.Lock()
        self._count = 0
        self._arrived: dict[int, tuple[str, Any]] = {}
        self._finished: dict[int, BaseException | None] = {}
        self._ready: deque[int] = deque()  # participants that may continue, in turn
        self._result: Any = None
        self._broken: BaseException | None = None

    @property
    def broken(self) -> BaseException | None:
        """The error that ended the step for all participants, None if there is none."""
        return self._broken

    def begin(self, count: int) -> None:
        """Starts a step; participant 0 is the caller, the others wait at their gates."""
        self._count = count
        self._arrived.clear()
        self._finished.clear()
        self._result = None
        self._ready.extend(range(1, count))

    def meet(
        self, rank: int, label: str, value: Any, combine: Callable[[Sequence[Any]], Any]
    ) -> Any:
        """Waits for all participants; returns what `combine` makes of their values.

        All participants get the same object.
        """
        with self._lock:
            self._check()
            self._arrived[rank] = (label, value)
            if self._finished:
                self._break(self._left_alone(next(iter(self._finished))), by=rank)
                self._check()
            last = len(self._arrived) == self._count
            if not last:
                self._pass_turn()
        if last:
            return self._conclude(rank, combine)
        self._wait(rank)
        with self._lock:
            self._check()
            return self._result

    def finish(self, rank: int, error: BaseException | None) -> None:
        """Ends the step of one participant; participant 0 waits until all have ended theirs."""
        with self._lock:
            self._finished[rank] = error
            if error is not None:
                self._break(error, by=rank)
            elif self._arrived and self._broken is None:
                self._break(self._left_alone(rank), by=rank)
            self._pass_turn()
            all_done = len(self._finished) == self._count
            if all_done and rank:
                self.gates[0].release()
        if rank == 0 and not all_done:
            try:
                self._wait(0)
            except KeyboardInterrupt as interrupt:
                with self._lock:
                    self._break(interrupt, by=rank)
                self._wait(0)  # until the others have stopped, at their next meeting

    def check(self) -> None:
        """Raises `ReplicaError` if the step is broken."""
        with self._lock:
            self._check()

    def _conclude(self, rank: int, combine: Callable[[Sequence[Any]], Any]) -> Any:
        """Combines the values, in the last participant to arrive; the others wait meanwhile."""
        labels, values = zip(*map(self._arrived.__getitem__, range(self._count)), strict=True)
        if len(set(labels)) > 1:
            held = ", ".join(f"replica {r}: {label}" for r, label in enumerate(labels))
            raise ReplicaError(
                f"Expected all replicas to do the same at the same time. Received: {held}. "
                "Replicas differ in their batch only: a branch that depends on the data must not "
                "decide whether they call the optimizer, a metric or a collective."
            )
        result = combine(values)
        with self._lock:
            self._check()
            self._result = result
            self._arrived.clear()
            self._ready.extend(other for other in range(self._count) if other != rank)
        return result

    def _pass_turn(self) -> None:
        if self._ready:
            self.gates[self._ready.popleft()].release()

    def _wait(self, rank: int) -> None:
        if self.gates[rank].acquire(timeout=self.timeout):
            return
        with self._lock:
            missing = [
                f"replica {other}"
                for other in range(self._count)
                if other not in self._arrived and other not in self._finished
            ]
            held = "; ".join(f"replica {r} waits at: {at}" for r, (at, _) in self._arrived.items())
            error = ReplicaError(
                f"Expected every replica within {self.timeout:g} s. Received: no sign of "
                f"{', '.join(missing)} ({held or 'the others have ended their step'}). Look for "
                "what it is waiting for; raise KERASDIST_MEETING_TIMEOUT if a step needs longer."
            )
            self._break(error, by=rank)
        raise error

    def _check(self) -> None:
        if self._broken is not None:
            raise Stopped(f"The step was ended by: {self._broken!r}")

    def _break(self, error: BaseException, *, by: int) -> None:
        """Ends the step for all participants: keeps the first error, and wakes those that wait."""
        if self._broken is not None:
            return
        self._broken = error
        self._ready.extend(rank for rank in self._arrived if rank != by)
        while self._ready:
            self.gates[self._ready.popleft()].release()

    def _left_alone(self, finished: int) -> ReplicaError:
        held = "; ".join(f"replica {r} waits at: {at}" for r, (at, _) in self._arrived.items())
        return ReplicaError(
            "Expected all replicas to do the same number of collectives and optimizer steps. "
            f"Received: replica {finished} ended its step while others wait ({held}). Replicas "
            "differ in their batch only: a branch that depends on the data must not decide about "
            "them."
        )
