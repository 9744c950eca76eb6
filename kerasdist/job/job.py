"""The job that this process is a worker of."""

from __future__ import annotations

import atexit
import os
import platform
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, final

from kerasdist._version import __version__
from kerasdist.cluster.membership import Membership
from kerasdist.cluster.ports import split
from kerasdist.errors import DisagreementError, JobError, KerasdistError
from kerasdist.job import comparison, joined, saves, script_exit
from kerasdist.job.hub import LEAVING, Hub
from kerasdist.job.link import Link
from kerasdist.job.listening import HeldPort, is_loopback
from kerasdist.job.secret import SECRET, credentials
from kerasdist.job.timeouts import Timeouts
from kerasdist.job.watch import NEWS_SECONDS, Watch, may_be_a_loss

_ADVICE = "All of them must run the same script in the same environment."


@final
class Job:
    """This worker among the others: what they agree on, and whether they are still there.

    What workers tell each other here are small facts. Tensors go by the collectives of the
    frameworks.

    Attributes:
        membership: This process's place.
        timeouts: How long to wait for the others.
        addresses: ``host:port`` of each worker, by rank, for the framework's own connections.
    """

    def __init__(
        self, membership: Membership, facts: Mapping[str, Any], timeouts: Timeouts
    ) -> None:
        """Joins the job; waits until all workers have come. All workers must call it.

        Args:
            membership: This process's place, with the coordinator's address.
            facts: What must be equal on all workers, such as versions.
            timeouts: How long to wait for the others.

        Raises:
            JobError: If the others cannot be reached.
            DisagreementError: If workers differ in `facts`.
        """
        self.membership = membership
        self.timeouts = timeouts
        self._hub: Hub | None = None
        self._numbers: dict[str, int] = {}
        self._lock = threading.Lock()
        self._saves = saves.OwnSaves()
        self._at_leave: list[Callable[[], None]] = []
        host, port = _coordinator(membership)
        known = credentials()
        if membership.is_chief:
            if known.secret is None and not is_loopback(host):
                _warn_of_open_network(membership, host, port)
            self._hub = Hub(host, port, membership.num_workers, timeouts, known)
        self._port = None if membership.addresses else HeldPort(loopback=is_loopback(host))
        facts_of_this = _own_facts(membership, host, self._port)
        self._link = Link(host, port, facts_of_this, timeouts, known)
        self.addresses = tuple(
            f"{member['address']}:{member['port']}" if member["given"] is None else member["given"]
            for member in self._link.roster
        )
        self._watch = Watch(self._link, self._hub)
        joined.note()
        self.agree("versions", {"kerasdist": __version__, **facts})

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all workers reach each other by loopback addresses."""
        return all(is_loopback(split(one, "a worker's address")[0]) for one in self.addresses)

    def own_port(self) -> HeldPort:
        """Returns the port of this worker's own address, held for the framework's server.

        Raises:
            JobError: If another process has taken it.
        """
        if self._port is None:
            number = split(self.addresses[self.rank], "this worker's address")[1]
            self._port = HeldPort(loopback=self.is_on_one_machine, port=number)
        return self._port

    @property
    def rank(self) -> int:
        """This worker's number, 0 for the chief."""
        return self.membership.rank

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return self.membership.num_workers

    @property
    def is_chief(self) -> bool:
        """Whether this worker writes the files."""
        return self.membership.is_chief

    def exchange(self, label: str, value: Any, channel: str = "main") -> list[Any]:
        """Returns what all workers bring, by rank.

        All workers must call it, with the same label, and those of a channel in the same order.

        Args:
            label: What to call this meeting in messages.
            value: A small value that JSON can say.
            channel: For meetings in another thread than the main one.

        Raises:
            WorkerLostError: If another worker does not come.
            DisagreementError: If another worker comes to another meeting.
        """
        self.check()
        with self._lock:
            number = self._numbers[channel] = self._numbers.get(channel, 0) + 1
        return self._link.meet(channel, number, label, value)

    def agree(self, label: str, facts: Mapping[str, Any], advice: str = _ADVICE) -> None:
        """Makes sure that facts are equal on all workers. All workers must call it.

        Workers send a digest, and the facts themselves only if the digests differ.

        Args:
            label: What the facts are about.
            facts: By name; values that JSON can say.
            advice: What a message tells the user to do.

        Raises:
            DisagreementError: If a worker says otherwise; on all workers alike.
        """
        digests = self.exchange(label, comparison.digest(facts))
        if len(set(digests)) == 1:
            return
        everyone = self.exchange(f"{label}, which differs", facts)
        raise DisagreementError(
            f"[worker {self.rank}/{self.num_workers}] Expected all workers to have the same "
            f"{label}. Received: {comparison.described_difference(everyone)}. {advice}"
        )

    @property
    def has_one_python(self) -> bool:
        """Whether all workers have the same version of Python."""
        return len({member.get("python") for member in self._link.roster}) == 1

    def wrote(self, path: str, outcome: Mapping[str, Any]) -> None:
        """Tells the other workers that the chief has written a file. Only the chief calls it.

        Args:
            path: The file.
            outcome: What they are to know; values that JSON can say.
        """
        self._link.wrote(path, outcome)

    def written_by_chief(self, path: str) -> Mapping[str, Any]:
        """Waits until the chief has written a file, or is known not to do it now.

        Args:
            path: The file.

        Returns:
            What the chief has called `wrote` with; empty where it does something else.

        Raises:
            WorkerLostError: If the chief does neither, in time.
        """
        with self.explaining(f"save to {path}"):
            with self._lock:
                question = self._saves.question(self._link.step, path)
            return self._link.written_by_chief(question)

    def check(self) -> None:
        """Raises the error that ended the job, if it has ended.

        Raises:
            JobError: What ended it.
        """
        if self._link.failure is not None:
            self._watch.disarm()
            raise self._link.failure

    @property
    def is_watched(self) -> bool:
        """Whether the job ends if what this worker does now stands still on all workers."""
        return bool(self._link.place)

    def tick(self) -> None:
        """Notes that this worker begins a step that needs the others.

        Raises:
            JobError: If the job has ended.
        """
        if self._link.failure is not None:
            self.check()
        self._link.step += 1

    def report_batches(self, report: Callable[[], Mapping[str, Any]]) -> None:
        """Lets the chief know what batches this worker has, with each sign of life.

        Args:
            report: Returns it; called in another thread.
        """
        self._link.report = report

    @contextmanager
    def explaining(self, place: str) -> Generator[None]:
        """Says in our words what a lost worker did to the work inside, which needs all workers.

        Args:
            place: What to call the work in messages.

        Raises:
            JobError: In place of a framework's error, if the job has ended.
        """
        self.check()
        outer, self._link.place = self._link.place, self._link.place or place
        self._link.entered += 1
        try:
            yield
        except KerasdistError:
            if self._link.failure is not None:
                self._watch.disarm()
            raise
        except SystemExit as error:
            script_exit.note(error)
            raise
        except Exception as error:
            failure = self._link.failure_within(NEWS_SECONDS) if may_be_a_loss(error) else None
            if failure is None:
                raise
            self._watch.disarm()
            raise failure from error
        finally:
            self._link.place = outer

    def at_leave(self, callback: Callable[[], None]) -> None:
        """Lets a framework take leave of the others, when all have come to their end.

        Args:
            callback: Called at the end of the process, unless the job has failed.
        """
        self._at_leave.append(callback)

    def after_connecting(self) -> None:
        """Comes before the framework, which is connected now, where the process ends.

        When the script ends, workers wait for each other before the framework disconnects. If it
        ends with an uncaught error or a failing exit code, the other workers are told first.
        """
        if self._port is not None:
            self._port.release()
        atexit.register(self.leave)
        script_exit.listen()
        self._watch.come_first()

    def leave(self) -> None:
        """Waits until all workers have come to their end, then says goodbye."""
        self._watch_over_leaving()
        self._link.close()
        if self._hub is not None:
            self._hub.wait_until_all_left(NEWS_SECONDS)
        self._watch.hasten()

    def _watch_over_leaving(self) -> None:
        if self._link.closed or self._link.failure is not None:
            return
        failure = script_exit.failure()
        if failure is not None:
            self._watch.fail(failure)
            return
        try:
            self.exchange("end of the script", self._link.step, channel=LEAVING)
        except JobError as error:
            self._watch.end(error)
        for callback in reversed(self._at_leave):
            callback()
        self._watch.disarm()


def _coordinator(membership: Membership) -> tuple[str, int]:
    if membership.coordinator is None:
        raise JobError(
            "Expected to know where the workers meet. Received: coordinator=None from "
            f"{membership.source}. Set KERASDIST_COORDINATOR=host:port, the same on all workers: "
            "a free port of the chief's machine."
        )
    host, port = split(membership.coordinator, "the coordinator's address")
    # Where all workers are on one machine, no other one needs to reach them.
    alone = membership.local_workers == membership.num_workers and not membership.addresses
    return ("127.0.0.1" if alone else host), port


def _warn_of_open_network(membership: Membership, host: str, port: int) -> None:
    sys.stderr.write(
        f"[worker 0/{membership.num_workers}] The network of this job is open: it has no secret, "
        f"so any process that reaches {host}:{port} can take part in it. Set {SECRET} to the same "
        "random text on all workers.\n"
    )


def _own_facts(
    membership: Membership, coordinator_host: str, port: HeldPort | None
) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "rank": membership.rank,
        "num_workers": membership.num_workers,
        "pid": os.getpid(),
        "python": sys.implementation.cache_tag,
        "host": platform.node(),
        "given": membership.addresses[membership.rank] if membership.addresses else None,
        "port": None if port is None else port.number,
    }
    # The others reach the chief by its name. It reaches itself by a way that is only its own.
    return {**facts, "address": coordinator_host} if membership.is_chief else facts
