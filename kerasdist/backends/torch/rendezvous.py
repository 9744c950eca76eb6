"""Where the threads of one step meet: each brings a value, the last combines, all get the result.

No framework in here. A step that goes wrong ends for everybody: a participant that raises, ends its
step while others wait for it, brings something else than they do, or does not come in time, breaks
the rendezvous, and whoever waits, or comes later, gets a `ReplicaError`.

With ``turns`` only one participant runs at a time, from meeting to meeting, always in the same
order. That is the right way where they share one processor (see `kerasdist.backends.torch.team`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

from kerasdist.errors import ReplicaError

# As long as NCCL gives a collective. A replica that waits for so long waits for one that hangs.
TIMEOUT_SECONDS = 600.0


@final
class Stopped(ReplicaError):  # noqa: N818  an order to stop, not the cause
    """This replica stops because the step was ended by another one."""


@final
class Rendezvous:
    """The meetings of up to `size` participants, step after step."""

    def __init__(self, size: int, *, timeout: float = TIMEOUT_SECONDS) -> None:
        """Makes the meeting place.

        Args:
            size: The largest number of participants of a step.
            timeout: How long, in seconds, a participant waits for the others.
        """
        self.timeout = timeout
        self.turns = False
        # A participant waits by acquiring its gate; whoever lets it go on releases the gate.
        self.gates = [threading.Lock() for _ in range(size)]
        for gate in self.gates:
            gate.acquire()
        self._lock = threading.Lock()
        self._count = 0
        self._arrived: dict[int, tuple[str, Any]] = {}
        self._finished: dict[int, BaseException | None] = {}
        self._ready: deque[int] = deque()  # may go on, once the turn is theirs
        self._result: Any = None
        self._broken: BaseException | None = None

    @property
    def broken(self) -> BaseException | None:
        """What ended the step for everybody, None while all is well."""
        return self._broken

    def begin(self, count: int, *, turns: bool) -> None:
        """Starts a step; participant 0 is the caller, the others wait at their gates.

        Args:
            count: How many take part, the first ones.
            turns: Whether they run one at a time.
        """
        self._count = count
        self.turns = turns
        self._arrived.clear()
        self._finished.clear()
        self._result = None
        self._let_go_on(range(1, count))

    def meet(
        self, rank: int, label: str, value: Any, combine: Callable[[Sequence[Any]], Any]
    ) -> Any:
        """Waits for the others and returns what `combine` makes of everybody's values.

        Args:
            rank: The participant that calls.
            label: What the meeting is for; all must give the same.
            value: What this participant brings.
            combine: Called once, by the last to arrive, with the values in the order of ranks.

        Returns:
            The result of `combine`, the same object for all.

        Raises:
            ReplicaError: If the step is broken.
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
        """Ends the step of one participant; participant 0 waits until all have ended theirs.

        Args:
            rank: The participant.
            error: What its step raised, None if it ended well.
        """
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
        """What the last to arrive does; the others wait meanwhile."""
        arrived = [self._arrived[participant] for participant in range(self._count)]
        if any(label != arrived[0][0] for label, _ in arrived):
            held = ", ".join(f"replica {r}: {label}" for r, (label, _) in enumerate(arrived))
            raise ReplicaError(
                f"Expected all replicas to do the same at the same time. Received: {held}. "
                "Replicas differ in their batch only: a branch that depends on the data must not "
                "decide whether they call the optimizer, a metric or a collective."
            )
        result = combine([value for _, value in arrived])
        with self._lock:
            self._check()
            self._result = result
            self._arrived.clear()
            self._let_go_on(other for other in range(self._count) if other != rank)
        return result

    def _let_go_on(self, ranks: Any) -> None:
        self._ready.extend(ranks)
        if not self.turns:
            while self._ready:
                self.gates[self._ready.popleft()].release()

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
                f"Expected every replica within {self.timeout} seconds. Received: no sign of "
                f"{', '.join(missing)} ({held or 'the others have ended their step'}). Look for "
                "what it is waiting for; a step that needs longer wants a larger time-out."
            )
            self._break(error, by=rank)
        raise error

    def _check(self) -> None:
        if self._broken is not None:
            raise Stopped(f"The step was ended by: {self._broken!r}")

    def _break(self, error: BaseException, *, by: int) -> None:
        """Ends the step for everybody: the first error counts, and whoever waits may go on."""
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
