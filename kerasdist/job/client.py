"""A worker's side of a job: its connection to the chief's coordinator."""

from __future__ import annotations

import itertools
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, final

from kerasdist.errors import DisagreementError, JobError, WorkerLostError
from kerasdist.job import handshake, protocol
from kerasdist.job.comparison import MAX_CHANGES, Report
from kerasdist.job.handshake import Credentials
from kerasdist.job.listening import address_in
from kerasdist.job.protocol import Facts, Timeouts

# The error for each kind of failure; `JobError` for other kinds.
_FAILURES = {
    "lost": WorkerLostError,
    "interrupted": WorkerLostError,
    "left early": WorkerLostError,
    "disagree": DisagreementError,
}

# How many seconds a new connection waits for the chief's first message: about `_FIRST_WAIT` at the
# first attempt, and at most `_LONGEST_WAIT` at later attempts. After a wait without a message, the
# worker closes the connection and tries again, because the kernel silently drops some connections
# if thousands of workers come at once.
_FIRST_WAIT, _LONGEST_WAIT = 3.0, 30.0


@final
class Client:
    """A worker's connection to the chief. One thread listens, another sends heartbeats.

    Attributes:
        facts: The facts that this worker sent about itself when it joined.
        who: The name of this worker in messages, such as ``[worker 0/2]``.
        roster: The coordinator's facts about all workers, known after all have joined.
        closed: Whether this worker has left the job.
        failure: The error that ended the job, None as long as the job goes on.
        address: This worker's ``host:port`` for the framework's own connections.
        step: How many steps this worker has begun; only steps that need the other workers count.
        place: The name of the running call, if it needs the other workers; otherwise empty.
        entered: How often this worker has entered a call that needs the other workers.
        failure_kind: Why the job ended, such as ``"interrupted"`` for a worker's Ctrl-C, or ``"left
            early"`` for a script that ended before the others'; empty as long as the job goes on.
        report: A function that returns the report on this worker's batches. The thread that sends
            heartbeats calls this function.
        last_collectives: A function that returns the last recorded collectives. The thread that
            sends heartbeats calls this function, too.
    """

    def __init__(
        self, host: str, port: int, facts: Facts, timeouts: Timeouts, credentials: Credentials
    ) -> None:
        """Connects to the chief, and waits until all workers have joined."""
        self.facts = dict(facts)
        self.step = 0
        self.place = ""
        self.entered = 0
        self.failure_kind = ""
        self.report: Callable[[], Report | None] = lambda: None
        self.last_collectives: Callable[[], list[str]] = list
        self._timeouts = timeouts
        self.who = f"[worker {facts['rank']}/{facts['num_workers']}]"
        self._changed = threading.Condition()
        self.failure: JobError | None = None
        self._results: dict[tuple[str, int], list[Any]] = {}
        # For each step and path: how often this worker has asked whether the chief wrote the file.
        self._saves: Counter[tuple[int, str]] = Counter()
        self._next_place = 0  # how many calls of `meets_here` have come to an end
        self._is_asked = False  # whether a worker has asked to meet in a call of `meets_here`
        self._meeting_place: int | None = None
        self.closed = False
        self._sending = threading.Lock()
        self._socket = self._connected(host, port, credentials)
        self._socket.settimeout(None)
        self.facts.setdefault("address", self._socket.getsockname()[0])
        self.address = address_in(self.facts)
        self.roster: Mapping[str, Any] = {}
        # How many heartbeats this worker has sent, and how many of them before the chief's last
        # message. The difference measures how long the chief has been silent. Unlike a clock, it
        # does not count the time in which this process was suspended.
        self._beats = self._heard = 0
        self._send({"type": "hello", **self.facts})
        threading.Thread(target=self._listen, name="kerasdist-client", daemon=True).start()
        threading.Thread(target=self._beat, name="kerasdist-beat", daemon=True).start()
        with self._changed:
            self._wait_for(lambda: bool(self.roster))

    def failure_within(self, seconds: float) -> JobError | None:
        """Waits up to `seconds` for the job to fail; returns the error, None if there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, seconds)
            return self.failure

    def meet(
        self, channel: str, number: int, label: str, value: object, wanted: str = protocol.ALL
    ) -> list[Any]:
        """Sends a value to a meeting, which is an exchange of values between all workers.

        Returns the values of all workers, unless `wanted` asks for less (see `protocol.ALL`).
        """
        message = {"type": "meet", "channel": channel, "number": number, "label": label}
        self._send({**message, "value": value, "wanted": wanted})
        return self._result(channel, number)

    def meets_here(self, wants: bool) -> bool:
        """Returns whether all workers meet at this call.

        All workers make the same number of calls, and can meet at any of them. As long as no worker
        `wants` to meet, nothing is sent. Otherwise all workers meet at the first call that no
        worker has passed yet.
        """
        with self._changed:
            if wants and not self._is_asked:
                self._is_asked = True
                self._send({"type": "ask"})
            if self._is_asked:
                self._wait_for(lambda: self._meeting_place is not None)
            here, self._next_place = self._next_place, self._next_place + 1
            if here != self._meeting_place:
                return False
            self._is_asked, self._meeting_place = False, None
            return True

    def wrote(self, path: str, outcome: Facts) -> None:
        """Tells the coordinator that the chief has written a file, or has failed to write it."""
        self._send({"type": "wrote", "step": self.step, "path": path, "outcome": dict(outcome)})

    def written_by_chief(self, path: str) -> Mapping[str, Any]:
        """Asks the coordinator whether the chief has written a file, and waits for the answer.

        The answer is the `outcome` that the chief passed to `wrote`. It is empty if the chief does
        not write the file.
        """
        with self._changed:
            step, number = self.step, self._saves.total() + 1
            occurrence = self._saves[step, path]
            index = sum(count for (at, _), count in self._saves.items() if at == step)
            self._saves[step, path] += 1
        asked = {"number": number, "step": step, "path": path}
        self._send({"type": "save", **asked, "occurrence": occurrence, "index": index})
        [outcome] = self._result(protocol.SAVES, number)
        return outcome

    def _result(self, channel: str, number: int) -> list[Any]:
        key = channel, number
        with self._changed:
            self._wait_for(lambda: key in self._results)
            return self._results.pop(key)

    def _wait_for(self, has_come: Callable[[], bool]) -> None:
        """Waits for a message; raises the job's error if the job ends before the message comes.

        This wait has no time-out of its own. The coordinator's time-out ends the job, and so the
        wait. If the coordinator is lost, `_beat` ends the wait.
        """
        self._changed.wait_for(lambda: has_come() or self.failure is not None)
        if self.failure is not None and not has_come():
            raise self.failure

    def close(self, error: str | None = None) -> None:
        """Leaves the job; `error` is the reason, if the worker leaves because of an error."""
        if not self.closed:
            self._send({"type": "bye", "error": error})
            self.closed = True

    def fail(self, kind: str, why: str) -> None:
        """Stores the error that ended the job; ignores later errors, and errors after `close`."""
        with self._changed:
            if self.failure is None and not self.closed:
                self.failure_kind = kind
                self.failure = _FAILURES.get(kind, JobError)(f"{self.who} {why}.")
            self._changed.notify_all()

    def _connected(self, host: str, port: int, credentials: Credentials) -> socket.socket:
        deadline = time.monotonic() + self._timeouts.join
        # The wait is random, so that workers do not all try again at the same moment.
        wait = _FIRST_WAIT * random.SystemRandom().uniform(1, 1.5)
        while True:
            left = max(1.0, deadline - time.monotonic())
            try:
                return handshake.introduced(host, port, credentials, min(wait, left))
            except OSError as error:
                if time.monotonic() > deadline:
                    raise JobError(
                        f"{self.who} Expected the chief at {host}:{port} within "
                        f"{self._timeouts.join:g} s. Received: {error}. Look for an error in the "
                        "chief's log, or whether the port is open in the firewall; give it more "
                        "time with KERASDIST_JOIN_TIMEOUT."
                    ) from error
                wait = min(2 * wait, _LONGEST_WAIT) if isinstance(error, TimeoutError) else wait
                time.sleep(0.1)
            except JobError as error:
                raise JobError(f"{self.who} {error}") from error

    def _listen(self) -> None:
        try:
            while not self.closed:
                message = protocol.receive(self._socket)
                self._heard = self._beats
                with self._changed:
                    self._hear(message)
                    self._changed.notify_all()
        except OSError as error:
            self.fail("lost", f"the chief, worker 0, is lost: {error}: it was killed or has ended")
        finally:
            self._socket.close()

    def _hear(self, message: Any) -> None:
        match message["type"]:
            case "met":
                values = message["values"]
                runs = [[values[index]] * count for index, count in message["runs"]]
                key = message["channel"], message["number"]
                self._results[key] = list(itertools.chain.from_iterable(runs))
            case "roster":
                self.roster = message
            case "asked":
                self._is_asked = True
                self._send({"type": "next", "place": self._next_place})
            case "meet at":
                self._meeting_place = message["place"]
            case "refused":
                self.fail("refused", message["why"])
            case "failure":
                self.fail(message["kind"], message["why"])
            # a message of another type only shows that the chief is alive

    def _beat(self) -> None:
        limit = self._timeouts.heartbeat
        while not self.closed and self.failure is None:
            doing = [self.step, self.place, self.entered]
            told = {"batches": self._batches(), "collectives": self.last_collectives()}
            self._send({"type": "beat", "doing": doing, **told})
            if (self._beats - self._heard) * self._timeouts.beat > limit:
                self.fail(
                    "lost",
                    f"the chief, worker 0, has not given a sign of life for {limit:g} s: it was "
                    "stopped, or is cut off from the network (KERASDIST_HEARTBEAT_TIMEOUT)",
                )
            time.sleep(self._timeouts.beat)
            self._beats += 1

    def _batches(self) -> Report | None:
        report = self.report()
        return report if report is not None and len(report["changes"]) <= MAX_CHANGES else None

    def _send(self, message: object) -> None:
        if self.closed:
            return
        try:
            with self._sending:
                self._socket.sendall(protocol.packed(message))
        except OSError as error:
            self.fail("lost", f"the chief, worker 0, is lost: {error}")
