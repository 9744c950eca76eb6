"""Chooses the slots of each attempt of a job.

A slot is a place for one worker on a host. A job with a fixed number of workers always has the same
slots. In an elastic job, ``--workers A:B``, a slot can be used again as soon as its worker has
ended, with two exceptions. The slots of a host that ssh cannot reach are left out until the host
answers. A slot whose worker failed by itself in two attempts, without a backup between them, is
left out for a while, because its GPU may be broken, for example. A machine that joins
(`joining.py`) adds slots as long as its connections are open. The job starts to use additional
slots at its next restart or its next backup. At a backup the launcher ends the workers and starts a
larger number of workers. The new workers can continue from a backup that fewer workers have
written.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import final

from kerasdist.cli.launch import start, supervisor
from kerasdist.cli.launch.elastic.joining import Seats
from kerasdist.cli.launch.placement import Slot, listed, place
from kerasdist.cli.launch.spec import AttemptResult, JobSpec
from kerasdist.cli.launch.worker import Events, Screen, Signalled, Waiting
from kerasdist.errors import ClusterError

FAILURES = 2
"""A slot is left out after its workers have failed this often without a backup in between."""

AWAY_SECONDS = 600.0
"""The seconds for which a slot is left out; each further failure doubles this time."""

WAIT_SECONDS = 600.0
"""The seconds for which a job with too few workers waits for hosts."""

_PAUSE = 10.0
_ANSWER_SECONDS = 40.0  # ssh itself tries to connect for 20 s, and may then wait for a shell


@final
class Slots:
    """The slots of a job; each attempt gets the slots that can be used.

    Args:
        spec: The description of the job.
        events: The queue that gets an event when a backup is saved and slots can be added.
        screen: The output for messages, such as the hosts that the launcher waits for.

    Raises:
        ClusterError: If the workers cannot be placed, or a job that may grow has no
            valid range of workers.
    """

    def __init__(self, spec: JobSpec, events: Events, screen: Screen) -> None:
        least, most = spec.min_workers, spec.workers
        self._is_fixed = least is None and spec.join_port is None
        self._down: set[str] = set()
        if self._is_fixed:
            slots = listed(spec)
            least = most = len(slots)
        elif least is None or not isinstance(most, int) or not 1 <= least <= most:
            raise ClusterError(
                "Expected a range of workers, because the job may shrink and grow. Received: "
                f"workers={most!r}, min_workers={least!r}. Write for example --workers 2:8."
            )
        else:
            slots = place(None, spec.hosts) if spec.hosts else ()
            # Spare slots of the hosts are kept, too. If there are too few slots, `listed` divides
            # the workers among the hosts, or raises an error.
            if len(slots) < most:
                slots = listed(spec)
            self._down = {slot.host for slot in slots if slot.host is not None}
        self._least, self._most = least, most
        self._slots = list(slots)
        self._events, self._screen = events, screen
        self._seats = None if spec.join_port is None else Seats(spec, screen)
        self._answers: set[str] = set()
        self._asking, self._joining = threading.Lock(), threading.Lock()
        self._failures: Counter[Slot] = Counter()
        self._away_until: dict[Slot, float] = {}
        self._used: Sequence[Slot] = ()
        self._backup: tuple[int, int] | None = None

    def choose(self) -> tuple[Slot, ...]:
        """Returns the slots of the next attempt; waits for hosts if there are too few slots.

        Raises:
            ClusterError: If too few slots can be used, or the launcher is told to stop.
        """
        until = time.monotonic() + WAIT_SECONDS
        self._down -= self._ask(self._down)
        while len(self._usable()) < self._least:
            hosts = f"hosts that do not answer: {sorted(self._down)}"
            found = f"{len(self._usable())} workers, and {hosts}"
            if time.monotonic() > until:
                raise ClusterError(
                    f"Expected {self._least} workers at least. Received: {found}, for "
                    f"{WAIT_SECONDS:g} s. Start these hosts, or ask for fewer workers."
                )
            self._screen.say(f"waiting for {self._least} workers at least: {found}")
            self._pause()
            self._down -= self._ask(self._down)
        self._answers = set()
        self._used = sorted(self._usable()[: self._most], key=self._slots.index)
        return self._numbered()

    def describe(self) -> str:
        """Returns a message for the user before a restart.

        The message says how many workers continue, from which step, and what is not used: hosts
        that do not answer, and slots whose workers have failed.
        """
        at = "its last backup, if there is one"
        if self._backup is not None:
            epoch, batches = self._backup
            at = f"epoch {epoch + 1}, step {batches + 1}"
        said = f"the job goes on with {len(self._used)} of {self._most} workers from {at}"
        if self._down:
            said += f"; hosts that do not answer: {', '.join(sorted(self._down))}"
        away = [slot for slot in self._away_until if slot not in self._used]
        failing = [f"{slot.host or 'this machine'}:{slot.local_rank}" for slot in away]
        return said + (f"; left out since they failed again: {', '.join(failing)}" * bool(failing))

    def learn(self, result: AttemptResult) -> None:
        """Counts the failures of slots in an attempt, and leaves out slots that fail again."""
        if not result.failed or self._is_fixed:
            return
        endings = result.endings
        to_blame = [each for each in endings if each.failed_by_itself]
        # A worker that hangs does not fail by itself: the other workers report it as lost, and the
        # launcher kills it. So if no worker has failed by itself, the killed workers are to blame.
        to_blame = to_blame or [each for each in endings if each.killed]
        for each in to_blame:
            slot = self._used[each.rank]
            if each.exit_code == supervisor.LOST and slot.host is not None and not slot.machine:
                self._down.add(slot.host)  # the next call of `choose` asks whether the host is up
            if len(to_blame) == len(endings):
                continue  # all have failed, so the script is to blame
            self._failures[slot] += 1
            excess = self._failures[slot] - FAILURES
            if excess >= 0:
                self._away_until[slot] = time.monotonic() + AWAY_SECONDS * 2**excess

    def heard_of_backup(self, attempt: int, epoch: int, batches: int, epochs: int) -> None:
        """Handles a worker's report of a backup; asks for a restart if workers can be added.

        The failures of the slots in use no longer count, because the job has made progress.
        """
        self._backup = epoch, batches
        for slot in self._used:
            del self._failures[slot]
            self._away_until.pop(slot, None)
        if epoch >= epochs:
            return
        answers = self._answers & self._down
        waiting = [slot for slot in self._usable(answers) if slot not in self._used]
        if waiting and len(self._used) < self._most:
            self._events.put(Waiting(attempt))
        elif self._down and self._asking.acquire(blocking=False):
            threading.Thread(target=self._ask_beside, daemon=True).start()

    def end(self, code: int) -> None:
        """Tells the machines that have joined how the job has ended."""
        if self._seats is not None:
            self._seats.end(code)

    def _usable(self, answering: Collection[str] = ()) -> list[Slot]:
        """Returns the usable slots, with recently failed slots only if there are too few others.

        A host that was down is usable if it is in `answering`.
        """
        down = self._down.difference(answering)
        # Reports of different workers arrive on different threads, so this code needs a lock.
        with self._joining:
            seats = [] if self._seats is None else self._seats.waiting()
            self._slots += [slot for slot in seats if slot not in self._slots]
        there = [
            slot
            for slot in self._slots
            if (slot in seats if slot.machine else slot.host not in down)
        ]
        now = time.monotonic()
        away = [slot for slot in there if self._away_until.get(slot, now) > now]
        ready = [slot for slot in there if slot not in away]
        away.sort(key=self._failures.__getitem__)
        return ready + away[: max(self._least - len(ready), 0)]

    def _numbered(self) -> tuple[Slot, ...]:
        """Returns the chosen slots, with the ranks of their workers in the next attempt."""
        sizes = Counter(slot.host for slot in self._used)
        numbers = defaultdict[str | None, Iterator[int]](itertools.count)
        numbered: list[Slot] = []
        for rank, slot in enumerate(self._used):
            place = next(numbers[slot.host]), sizes[slot.host]
            connection = self._seats.take(slot) if self._seats and slot.machine else None
            numbered.append(Slot(slot.host, rank, *place, slot.own_share, slot.machine, connection))
        return tuple(numbered)

    def _pause(self) -> None:
        try:
            event = self._events.get(timeout=_PAUSE)
        except queue.Empty:
            return
        if isinstance(event, Signalled):
            raise ClusterError("The job got a signal to stop while it waited for workers.")

    def _ask_beside(self) -> None:
        try:
            self._answers = self._ask(self._down)
        finally:
            self._asking.release()

    def _ask(self, hosts: Collection[str]) -> set[str]:
        """Runs the command ``true`` on the hosts by ssh; returns the hosts on which it succeeds."""
        return start.run_on(hosts, ("true",), _ANSWER_SECONDS)
