"""The threads that run the replicas of a process.

Replica 0 runs in the calling thread. In `fit`, if a replica has ended its step in the calling
thread before the next replica has begun, the next one runs in the calling thread, too. Every other
replica runs in a thread that ends with the step, as in `tf.distribute`. A thread that outlived the
step would keep its team of OpenMP threads. If the teams together had more threads than there are
cores, OpenMP would slow down all steps of the process, also those of plain models.

At a collective (`meet`) each replica gives a value, the last replica to arrive combines the values,
and all replicas get the result. A replica that does not need the result does not wait for it.

One replica can end the step for all others: if it raises an error, ends its step while others wait,
makes another call than the others, or does not arrive in time. Then every replica that waits or
arrives later gets a `ReplicaError`.

The threads take turns: only one thread runs at a time, from one collective to the next, and always
in the same order. So replicas can share the state that Keras's layers and torch keep once per
process, such as a layer's cached mask, torch's own generator, or a layer that is built by its first
call.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar, final

import torch

from kerasdist import keras_compat
from kerasdist.backends.base.checks import differing_calls
from kerasdist.backends.base.kept_state import KeptState
from kerasdist.backends.torch import internals
from kerasdist.core.context import current
from kerasdist.errors import ReplicaError

_Value = TypeVar("_Value")
_Result = TypeVar("_Result")


@final
class Stopped(ReplicaError):  # noqa: N818  no "Error" in the name: the cause is another error
    """The error in a replica that stops because another replica has ended the step."""


@final
class ReplicaThreads:
    """Runs a step's replicas in threads. After an error the caller must make a new object."""

    def __init__(self, size: int, *, timeout: float) -> None:
        self._timeout = timeout
        self._work: Callable[[int], Any] | None = None
        self._results: list[Any] = [None] * size
        # A replica waits by acquiring its gate, until another replica releases that gate.
        self._gates = [threading.Lock() for _ in range(size)]
        for gate in self._gates:
            gate.acquire()
        self._lock = threading.Lock()
        self._count = 0
        self._arrived: dict[int, tuple[str, Any]] = {}
        self._finished: set[int] = set()
        self._ready: deque[int] = deque()  # replicas that may continue, in order of their turns
        self._to_start: set[int] = set()  # replicas whose threads are not started yet
        self._result: Any = None
        self._broken: BaseException | None = None  # the error that ended the step for all replicas
        self._kept: KeptState | None = None
        self._caller = 0  # the thread that has called `run`
        self._shares_caller = False  # whether several replicas may run in that thread

    def run(
        self,
        count: int,
        work: Callable[[int], _Result],
        kept: KeptState | None,
        *,
        shares_caller: bool = False,
    ) -> list[_Result]:
        """Runs ``work(rank)`` for the first `count` replicas; returns their results by rank.

        If `kept` is given, each replica has its own copy of the state that the user's code keeps in
        Python objects. If `shares_caller` is True, several replicas may run in the calling thread,
        one after another.
        """
        self._caller, self._shares_caller = threading.get_ident(), shares_caller
        self._count = count
        self._kept = kept
        if kept:
            kept.begin(count)
        self._arrived.clear()
        self._finished.clear()
        self._ready.extend(range(1, count))
        self._to_start.update(range(1, count))
        self._work = work
        try:
            rank: int | None = 0
            while rank is not None:
                rank = self._take_part(rank)
            if self._broken is not None:
                raise self._broken
            return self._results[:count]
        finally:
            self._work = self._result = None
            if self._kept:
                self._kept.end()
            self._kept = None
            self._results = [None] * len(self._results)

    def meet(
        self,
        rank: int,
        label: str,
        value: _Value,
        combine: Callable[[Sequence[_Value]], _Result],
        *,
        waits: bool = True,
    ) -> _Result:
        """Waits until each replica has given a value; returns `combine` of these values.

        All replicas get the same object. If `waits` is False, a replica that is not the last to
        arrive continues at once, and what it gets is undefined.
        """
        is_last = False
        kept = self._kept
        taken = kept.take() if kept else {}
        # In its last call this replica did not wait, and others have not made that call yet.
        if rank in self._arrived and self._broken is None:
            with self._lock:
                self._pass_turn()
            self._wait(rank)
        with self._lock:
            if self._broken is None:
                self._arrived[rank] = (label, value)
                is_last = len(self._arrived) == self._count
                absent = self._finished - self._arrived.keys()
                if absent:
                    self._break(self._left_alone(min(absent)), by=rank)
                elif waits and not is_last:
                    self._pass_turn()
        if is_last:
            self._conclude(rank, combine)
        elif waits and self._broken is None:
            self._wait(rank)
        if self._broken is not None:
            raise self._stopped()
        if kept:
            kept.put_back(taken)
        return self._result

    def _take_part(self, rank: int) -> int | None:
        """Runs one replica; returns which replica this thread must run next, or None."""
        error = None
        try:
            if self._broken is not None:
                raise self._stopped()
            if self._kept:
                self._kept.start(rank)
            self._results[rank] = self._work(rank)  # type: ignore[misc]
            if self._kept:
                self._kept.finish(rank)
        except Stopped as stop:
            error = stop
        except BaseException as raised:  # noqa: BLE001  `run` raises it in the calling thread
            raised.add_note(f"Raised in replica {rank}.")
            error = raised
        return self._finish(rank, error)

    def _finish(self, rank: int, error: BaseException | None) -> int | None:
        """Ends the step of one replica; returns which replica this thread must run next, or None.

        If the result is None, the thread that has called `run` first waits here until all replicas
        have ended.
        """
        in_caller = threading.get_ident() == self._caller
        with self._lock:
            self._finished.add(rank)
            all_done = len(self._finished) == self._count
            left_alone = self._arrived if all_done else self._arrived.keys() - self._finished
            if error is not None:
                self._break(error, by=rank)
            elif left_alone and self._broken is None:
                self._break(self._left_alone(rank), by=rank)
            elif in_caller and self._shares_caller and self._to_start:
                following = self._ready.popleft()
                self._to_start.remove(following)
                return following
            self._pass_turn()
            if all_done and not in_caller:
                self._gates[0].release()
        if in_caller and not all_done:
            try:
                self._wait(0)
            except KeyboardInterrupt as interrupt:
                with self._lock:
                    self._break(interrupt, by=rank)
                self._wait(0)  # waits until all others have stopped, each at its next collective
        return None

    def _conclude(self, rank: int, combine: Callable[[Sequence[Any]], object]) -> None:
        """Combines all values in the thread of the last replica to arrive; other replicas wait."""
        labels, values = zip(*map(self._arrived.__getitem__, range(self._count)), strict=True)
        if len(set(labels)) > 1:
            held = ", ".join(f"replica {r}: {label}" for r, label in enumerate(labels))
            raise differing_calls(held)
        result = combine(values)
        with self._lock:
            if self._broken is None:
                self._result = result
                self._arrived.clear()
                others = set(range(self._count)) - self._finished - {rank}
                self._ready.extend(sorted(others))

    def _pass_turn(self) -> None:
        if self._ready:
            rank = self._ready.popleft()
            if rank in self._to_start:
                self._to_start.remove(rank)
                name = f"kerasdist-replica-{rank}"
                threading.Thread(None, self._take_part, name, (rank,), daemon=True).start()
            else:
                self._gates[rank].release()

    def _wait(self, rank: int) -> None:
        if self._gates[rank].acquire(timeout=self._timeout):
            return
        with self._lock:
            missing = [
                f"replica {other}"
                for other in range(self._count)
                if other not in self._arrived and other not in self._finished
            ]
            error = ReplicaError(
                f"Expected every replica within {self._timeout:g} s. Received: no sign of "
                f"{', '.join(missing)} ({self._waiting() or 'the others have ended their step'}). "
                "Look for what a missing replica waits for; raise KERASDIST_MEETING_TIMEOUT if a "
                "step needs longer."
            )
            self._break(error, by=rank)
        raise error

    def _break(self, error: BaseException, *, by: int) -> None:
        """Ends the step for all replicas: keeps the first error, and wakes the waiting replicas."""
        if self._broken is not None:
            return
        self._broken = error
        self._ready.extend(self._arrived.keys() - self._finished - {by})
        while self._ready:
            self._pass_turn()

    def _stopped(self) -> Stopped:
        return Stopped(f"The step was ended by: {self._broken!r}")

    def _waiting(self) -> str:
        return "; ".join(
            f"replica {r} waits at: {label}" for r, (label, _) in self._arrived.items()
        )

    def _left_alone(self, finished: int) -> ReplicaError:
        return differing_calls(
            f"replica {finished} ended its step while others wait ({self._waiting()})"
        )


@final
class ThreadSettings:
    """The thread-local settings of torch and Keras in the thread that makes this object.

    Attributes:
        context: The values of context variables, of which each replica gets a copy.
    """

    def __init__(self) -> None:
        """Stores the settings of the calling thread."""
        self.context = copy_context()
        self._keras_state = keras_compat.copy_thread_state()
        # Each of these functions returns a context that applies one setting to the calling thread.
        self._makers: list[Callable[[], AbstractContextManager[Any]]] = [
            partial(torch.inference_mode, torch.is_inference_mode_enabled()),
            partial(torch.set_grad_enabled, torch.is_grad_enabled()),
        ]
        if current.trial is not None:
            self._makers.append(partial(keras_compat.in_trial, current.trial))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                dtype = torch.get_autocast_dtype(kind)
                self._makers.append(partial(torch.autocast, kind, dtype))
        for mode in (*internals.FUNCTION_MODES.value(), *internals.DISPATCH_MODES.value()):
            self._makers.append(partial(_mode_of_thread, mode))
        hooks = internals.SAVED_TENSORS_HOOKS.value(True)  # also while torch traces code
        if hooks:
            self._makers.append(partial(torch.autograd.graph.saved_tensors_hooks, *hooks))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Applies the settings to the current thread, which runs a replica."""
        keras_compat.paste_thread_state(self._keras_state)
        with ExitStack() as stack:
            for make in self._makers:
                stack.enter_context(make())
            yield


def _mode_of_thread(mode: Any) -> AbstractContextManager[Any]:
    """Converts a torch mode of the thread that runs the step to the mode for a replica's thread.

    From a ``torch.device`` mode the number of the device is left out, so that ``"cuda:0"`` becomes
    the replica's own GPU. Other modes stay as they are.
    """
    device = getattr(mode, "device", None)
    if isinstance(device, torch.device) and type(mode).__module__.startswith("torch."):
        return torch.device(device.type)
    return mode
