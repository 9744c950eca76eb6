"""A worker's side of a job: its connection to the chief's hub."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, final

from kerasdist.errors import DisagreementError, JobError, WorkerLostError
from kerasdist.job import handshake, saves, wire
from kerasdist.job.batches import MAX_CHANGES
from kerasdist.job.secret import Credentials
from kerasdist.job.timeouts import Timeouts

_INTERRUPTED = "interrupted"
_FAILURES = {
    "lost": WorkerLostError,
    _INTERRUPTED: WorkerLostError,
    "disagree": DisagreementError,
}


@final
class Link:
    """One connection, a thread that listens to it, and one that gives signs of life.

    Attributes:
        facts: What this worker said of itself.
        step: How many steps that need the others this worker has begun.
        place: What it is doing that needs them; empty: nothing.
        entered: How often it has begun to do so.
        interrupted: Whether the job has ended because a worker was interrupted by Ctrl-C.
        report: Returns what batches it has had; called in another thread.
    """

    def __init__(
        self,
        host: str,
        port: int,
        facts: Mapping[str, Any],
        timeouts: Timeouts,
        credentials: Credentials,
    ) -> None:
        """Connects, and waits until all workers have come.

        Args:
            host: The chief's machine.
            port: The hub's port.
            facts: What the hub is told of this worker.
            timeouts: How long to wait.
            credentials: By what the workers of this job recognize each other.

        Raises:
            JobError: If the chief cannot be reached, or refuses this worker.
            WorkerLostError: If not all workers come.
        """
        self.facts = dict(facts)
        self.step = 0
        self.place = ""
        self.entered = 0
        self.interrupted = False
        self.report: Callable[[], Mapping[str, Any] | None] = lambda: None
        self._timeouts = timeouts
        self._who = f"[worker {facts['rank']}/{facts['num_workers']}]"
        self._changed = threading.Condition()
        self._failure: JobError | None = None
        self._results: dict[tuple[str, int], list[Any]] = {}
        self._closed = False
        self._sending = threading.Lock()
        self._socket = self._connected(host, port, credentials)
        self._roster = self._admitted()
        self._heard = time.monotonic()
        threading.Thread(target=self._listen, name="kerasdist-link", daemon=True).start()
        threading.Thread(target=self._beat, name="kerasdist-beat", daemon=True).start()

    @property
    def roster(self) -> list[dict[str, Any]]:
        """What each worker said of itself, by rank."""
        return self._roster

    @property
    def who(self) -> str:
        """This worker, as messages begin: ``[worker 0/2]``."""
        return self._who

    @property
    def closed(self) -> bool:
        """Whether this worker has said goodbye."""
        return self._closed

    @property
    def failure(self) -> JobError | None:
        """What ended the job, None while it goes on."""
        return self._failure

    def failure_within(self, seconds: float) -> JobError | None:
        """Waits for the news that the job has ended.

        Args:
            seconds: How long at most.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, seconds)
            return self._failure

    def meet(self, channel: str, number: int, label: str, value: Any) -> list[Any]:
        """Brings a value to a meeting, and returns what all workers brought.

        Args:
            channel: Meetings of one channel come in the same order on every worker.
            number: Which meeting of the channel this is.
            label: What to call it in messages; equal on all workers.
            value: What JSON can say.

        Raises:
            JobError: If the job ends before all have come.
        """
        message = {"type": "meet", "channel": channel, "number": number, "label": label}
        self._send({**message, "value": value})
        return self._result(channel, number)

    def wrote(self, path: str, outcome: Mapping[str, Any]) -> None:
        """Tells the hub what the chief has written.

        Args:
            path: The file.
            outcome: What the others are to know.
        """
        self._send({"type": "wrote", "step": self.step, "path": path, "outcome": dict(outcome)})

    def written_by_chief(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        """Asks the hub whether the chief has written a file, and waits for the answer.

        Args:
            question: Which file; see `kerasdist.job.saves.OwnSaves`.

        Raises:
            JobError: If the job ends before there is an answer.
        """
        self._send({"type": "save", **question})
        [outcome] = self._result(saves.CHANNEL, question["number"])
        return outcome

    def _result(self, channel: str, number: int) -> list[Any]:
        key = channel, number
        with self._changed:
            # The hub has a time-out for this, and the beat one for the hub.
            self._changed.wait_for(lambda: key in self._results or self._failure is not None)
            if key in self._results:
                return self._results.pop(key)
            assert self._failure is not None
            raise self._failure

    def close(self, error: str | None = None) -> None:
        """Says goodbye.

        Args:
            error: What this worker ends with, None if all is well.
        """
        if not self._closed:
            self._send({"type": "bye", "error": error})
            self._closed = True

    def fail(self, kind: str, why: str) -> None:
        """Notes the end of the job.

        Args:
            kind: ``"lost"``, ``"interrupted"`` or ``"disagree"``.
            why: What happened.
        """
        with self._changed:
            if self._failure is None and not self._closed:
                self.interrupted = kind == _INTERRUPTED
                self._failure = _FAILURES[kind](f"{self._who} {why}.")
            self._changed.notify_all()

    def _connected(self, host: str, port: int, credentials: Credentials) -> socket.socket:
        deadline = time.monotonic() + self._timeouts.join
        while True:
            try:
                return self._introduced(host, port, credentials, deadline)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise JobError(
                        f"{self._who} Expected the chief at {host}:{port} within "
                        f"{self._timeouts.join:g} s. Received: {error}. Look for an error in the "
                        "chief's log, or whether the port is open in the firewall; give it more "
                        "time with KERASDIST_JOIN_TIMEOUT."
                    ) from error
                time.sleep(0.1)
            except JobError as error:
                raise JobError(f"{self._who} {error}") from error

    def _introduced(
        self, host: str, port: int, credentials: Credentials, deadline: float
    ) -> socket.socket:
        """Returns a connection to the chief, after both have proved that they are of this job."""
        connection = socket.create_connection((host, port), timeout=5)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A chief that is still starting accepts later; its port may be open already.
            connection.settimeout(max(1.0, deadline - time.monotonic()))
            asked = wire.receive(connection, handshake.MAX_BYTES)
            answered = handshake.answer(asked, credentials)
            connection.sendall(wire.packed(answered))
            proof = wire.receive(connection, handshake.MAX_BYTES)
            handshake.check_proof(asked, answered, proof, credentials)
        except BaseException:
            connection.close()
            raise
        return connection

    def _admitted(self) -> list[dict[str, Any]]:
        here = self._socket.getsockname()[0]
        self.facts.setdefault("address", here)
        self._send({"type": "hello", **self.facts})
        # The hub ends the waiting by itself; some seconds more for its news to arrive.
        self._socket.settimeout(self._timeouts.join + 10)
        while True:
            try:
                message = wire.receive(self._socket)
            except OSError as error:
                raise JobError(
                    f"{self._who} Expected the chief to let this worker in. Received: {error}. "
                    "Look for an error in the chief's log, or for another service on that port."
                ) from error
            match message["type"]:
                case "roster":
                    self._socket.settimeout(None)
                    return message["members"]
                case "refused":
                    raise JobError(f"{self._who} {message['why']}.")
                case "failure":
                    raise _FAILURES[message["kind"]](f"{self._who} {message['why']}.")
                case _:  # a beat
                    pass

    def _listen(self) -> None:
        try:
            while not self._closed:
                message = wire.receive(self._socket)
                self._heard = time.monotonic()
                match message["type"]:
                    case "met":
                        with self._changed:
                            key = message["channel"], message["number"]
                            self._results[key] = message["values"]
                            self._changed.notify_all()
                    case "failure":
                        self.fail(message["kind"], message["why"])
                    case _:  # a beat
                        pass
        except OSError as error:
            self.fail("lost", f"the chief, worker 0, is lost: {error}: it was killed or has ended")
        finally:
            self._socket.close()

    def _beat(self) -> None:
        limit = self._timeouts.heartbeat
        while not self._closed and self._failure is None:
            doing = [self.step, self.place, self.entered]
            self._send({"type": "beat", "doing": doing, "batches": self._batches()})
            if time.monotonic() - self._heard > limit:
                self.fail(
                    "lost",
                    f"the chief, worker 0, has not given a sign of life for {limit:g} s: it was "
                    "stopped, or is cut off from the network (KERASDIST_HEARTBEAT_TIMEOUT)",
                )
            time.sleep(min(1.0, limit / 4))

    def _batches(self) -> Mapping[str, Any] | None:
        report = self.report()
        return report if report is not None and len(report["changes"]) <= MAX_CHANGES else None

    def _send(self, message: Any) -> None:
        if self._closed:
            return
        try:
            with self._sending:
                self._socket.sendall(wire.packed(message))
        except OSError as error:
            self.fail("lost", f"the chief, worker 0, is lost: {error}")
