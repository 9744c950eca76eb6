"""The job that this process is a worker of."""

from __future__ import annotations

import atexit
import itertools
import os
import platform
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, final

from kerasdist.cluster.addresses import split
from kerasdist.cluster.source import Membership
from kerasdist.core import __version__, whole_files
from kerasdist.errors import (
    ClusterError,
    DisagreementError,
    JobError,
    KerasdistError,
    WorkerLostError,
)
from kerasdist.job import collectives, comparison, launcher, protocol
from kerasdist.job.client import Client
from kerasdist.job.coordinator import LEAVING, MAIN, Coordinator
from kerasdist.job.handshake import SECRET, credentials
from kerasdist.job.interruption import DroppedInterrupts, ExitCode
from kerasdist.job.listening import HeldPort, is_loopback, raise_file_limit
from kerasdist.job.monitor import NEWS_SECONDS, Monitor, may_be_a_loss
from kerasdist.job.protocol import Facts, Timeouts

_ADVICE = "All of them must run the same script in the same environment."


@final
class Job:
    """The job as this worker sees it: exchanges with the other workers, and errors if one is lost.

    Workers exchange small facts through this object. Tensors are exchanged by the frameworks'
    collectives.

    Attributes:
        membership: The rank of this process, the number of workers, and their addresses.
        rank: This worker's number, 0 for the chief.
        num_workers: How many workers there are.
        who: The name of this worker in messages, such as ``[worker 0/2]``.
        is_chief: Whether this worker is the chief, which writes files for all workers.
        timeouts: How long this worker waits for the others.
        address: ``host:port`` of this worker, for the framework's own connections.
        chief_address: The ``host:port`` of the chief.
        is_on_one_machine: Whether all workers reach each other by loopback addresses.
        collectives: The collectives that this worker has issued; None if they are not recorded.
    """

    def __init__(self, membership: Membership, facts: Facts, timeouts: Timeouts) -> None:
        """Joins the job and waits until all workers have joined. All must call this method."""
        self.membership = membership
        self.rank = membership.rank
        self.num_workers = membership.num_workers
        self.who = f"[worker {self.rank}/{self.num_workers}]"
        self.is_chief = membership.is_chief
        self.timeouts = timeouts
        self._coordinator: Coordinator | None = None
        self._numbers = defaultdict[str, Iterator[int]](itertools.count)
        self._at_leave: list[Callable[[], None]] = []
        self._failing_exit: tuple[str, int] | None = None
        self.collectives = collectives.log_if_wanted()
        host, port = _address_of_coordinator(membership)
        known = credentials()
        if membership.is_chief:
            if known.secret is None and not is_loopback(host):
                _warn_of_open_network(membership, host, port)
            self._coordinator = Coordinator(host, port, membership.num_workers, timeouts, known)
        else:
            # Gloo opens a connection to every other worker, and each one counts as an open file.
            raise_file_limit(membership.num_workers)
        self._port = None if membership.addresses else HeldPort(loopback=is_loopback(host))
        facts_of_this = _own_facts(membership, host, self._port)
        self._client = Client(host, port, facts_of_this, timeouts, known)
        if self.collectives is not None:
            self._client.last_collectives = self.collectives.last
        roster = self._client.roster
        self.address: str = self._client.address
        self.chief_address: str = roster["chief"]
        self.is_on_one_machine: bool = roster["on_one_machine"]
        self._monitor = Monitor(self._client, self._coordinator)
        self._interrupts = DroppedInterrupts(lambda: self.is_watched)
        atexit.register(self.leave)
        launcher.tell_launcher()
        recorded = {collectives.VARIABLE: int(self.collectives is not None)}
        versions = {"Python": sys.implementation.cache_tag, "kerasdist": __version__}
        self.assert_equal("versions", {**versions, **facts, **recorded})

    @property
    def other_addresses(self) -> list[str]:
        """Some addresses of other workers, at least one of them on another machine if possible."""
        known = self.membership.addresses or (self.chief_address, self._client.roster["far"])
        return [one for one in known if one not in (None, self.address)]

    def gather_addresses(self) -> tuple[str, ...]:
        """Returns ``host:port`` of each worker, by rank. All workers must call this method.

        Only the chief receives the addresses one by one; it compresses them once for all other
        workers.
        """
        if self.membership.addresses:
            return self.membership.addresses
        compressed = self.choose("addresses of workers", self.address, protocol.compressed)
        return tuple(protocol.decompressed(compressed))

    def workers_a_host(self) -> int:
        """Returns how many workers each machine has. All workers must call this method.

        Two workers with neighbouring ranks are on two machines if the machines' names differ.
        Copies of a virtual machine may have the same name. So the two workers also count as being
        on two machines if the local rank of the second one is not larger than that of the first.

        Raises:
            ClusterError: If a machine has more workers than another machine.
        """
        own = [platform.node(), self.membership.local_rank]
        sizes = self.choose("machines of workers", own, sizes_of_hosts)
        if len(set(sizes)) > 1:
            raise ClusterError(
                "Expected as many workers on each machine, with neighbouring ranks, to shard state "
                f"within a machine. Received: {sizes} workers on the machines, in the order of "
                "ranks. Start as many on each, or leave out `within` of kerasdist.Sharding."
            )
        return sizes[0]

    def own_port(self) -> HeldPort:
        """Returns the port of this worker's own address, reserved for the framework's server."""
        if self._port is None:
            number = split(self.address, "this worker's address")[1]
            self._port = HeldPort(loopback=self.is_on_one_machine, port=number)
        return self._port

    def all_gather_object(self, label: str, value: object) -> list[Any]:
        """Returns the values of all workers, by rank.

        All workers must call this method, with the same label and in the same order. Equal values
        are sent only once. If values differ, the data for each worker grow with the number of
        workers; `compare_objects`, `gather_object` and `broadcast_object` send less.
        """
        return self._meet(label, value)

    def compare_objects(self, label: str, value: object) -> list[int]:
        """Returns a number for each worker, by rank: equal for workers whose values are equal.

        The chief's number is 0. All workers must call this method.
        """
        return self._meet(label, value, protocol.NUMBERS)

    def all_have_one(self, label: str, value: object) -> bool:
        """Returns whether all workers have equal values. All workers must call this method."""
        return len(set(self.compare_objects(label, value))) == 1

    def first_difference(self, label: str, own: Sequence[str]) -> int | None:
        """Returns the first index at which workers' sequences differ; None if they are equal.

        All workers must call this method. They send a digest. If the digests differ, the chief
        sends a checksum of each item, and each worker sends the first index at which its own
        checksums differ from the chief's.
        """
        sums = [zlib.crc32(one.encode()) for one in own]
        if self.all_have_one(label, comparison.digest(sums)):
            return None
        pairs = itertools.zip_longest(sums, self.broadcast_object(f"the chief's {label}", sums))
        apart = (at for at, (one, chiefs) in enumerate(pairs) if one != chiefs)
        return self.choose(f"where {label} differ", next(apart, len(own)), min)

    def gather_object(self, label: str, value: object) -> list[Any]:
        """Returns the values of all workers on the chief, and an empty list on the others.

        All workers must call this method.
        """
        return self._meet(label, value, protocol.FOR_CHIEF)

    def choose(self, label: str, value: Any, choose: Callable[[list[Any]], Any]) -> Any:
        """Returns the result that the chief computes from the values of all workers.

        All workers must call this method. Only the chief gets all values.
        """
        everyone = self.gather_object(label, value)
        own = choose(everyone) if self.is_chief else None
        return self.broadcast_object(f"what the chief chooses of {label}", own)

    def broadcast_object(self, label: str, value: object) -> Any:
        """Returns the chief's value. All workers must call this method."""
        own = value if self.is_chief else None
        return self._meet(label, own)[0]

    def meets_here(self, wants: bool) -> bool:
        """Returns whether all workers meet here, because a worker has asked to meet.

        All workers must call this method equally often. No worker waits unless a worker `wants` to
        meet. Then all workers meet at the next call of the worker that is furthest ahead.
        """
        self.check()
        return self._client.meets_here(wants)

    def _meet(
        self, label: str, value: object, wanted: str = protocol.ALL, channel: str = MAIN
    ) -> list[Any]:
        self.check()
        return self._client.meet(channel, next(self._numbers[channel]), label, value, wanted)

    @contextmanager
    def chief_first(self) -> Generator[None]:
        """Runs the block on the chief first, then on the others. All must call this method."""
        done = self.all_do("what worker 0 does first in chief_first", WorkerLostError)
        if self.is_chief:
            with done:
                yield
        else:
            with done:
                pass
            yield

    @contextmanager
    def all_do(self, label: str, failure: type[Exception]) -> Generator[None]:
        """Waits for all workers when the block ends. If the block fails on one, it fails on all.

        The worker on which the block has failed raises its own error. The others raise an error of
        the type `failure`. All workers must enter the block.
        """
        error = None
        try:
            yield
        except JobError:
            raise
        except Exception as own:  # noqa: BLE001  raised below, when all workers know of the error
            error = own
        said = None if error is None else _shortened(error)
        try:
            everyone = self.all_gather_object(label, said)
        except JobError as lost:
            # If the block has failed here, other workers may wait in a collective of the block, and
            # so this exchange fails. The error is then shown as the cause of the failed exchange.
            raise lost from error
        if error is not None:
            raise error
        for rank, what in enumerate(everyone):
            if what is not None:
                work = f"all workers to do this: {label}"
                raise failure(self._said_elsewhere(work, rank, what))

    def _said_elsewhere(self, work: str, rank: int, error: str) -> str:
        """Returns the message of this worker's error about work that failed on another worker."""
        return (
            f"{self.who} Expected {work}. Received: an error on worker {rank}: {error}. The output "
            "of that worker shows the whole error."
        )

    def assert_equal(self, label: str, facts: Facts, advice: str = _ADVICE) -> None:
        """Raises DisagreementError if facts differ between workers.

        All workers must call this method. Each of them sends a digest of its facts. If the digests
        differ, one worker of each group with equal facts also sends the facts themselves.
        """
        numbers = self.compare_objects(label, comparison.digest(facts))
        groups = list(comparison.groups(enumerate(numbers)).values())
        if len(groups) == 1:
            return
        shown = [ranks[0] for ranks in groups[: comparison.NAMED]]
        own = facts if self.rank in shown else None
        everyone = self.all_gather_object(f"{label}, which differs", own)
        said = comparison.described_difference([everyone[rank] for rank in shown], groups)
        raise DisagreementError(
            f"{self.who} Expected all workers to have the same {label}. Received: {said}. {advice}"
        )

    def write_for_all(self, write: Callable[[], None], path: str) -> None:
        """Writes a file and informs workers that wait for it. Only the chief calls this method."""
        try:
            write()
        except BaseException as error:
            self._client.wrote(path, {"error": _shortened(error)})
            raise
        modified = None if whole_files.is_remote(path) else _modified(path)
        self._client.wrote(path, {"modified": modified})

    def is_written_by_chief(self, path: str) -> bool:
        """Waits until the chief has written a file, or until it is clear that the chief will not.

        Returns whether the chief has written this path on a file system that the workers share.
        """
        with self.translating_failures(f"save to {path}"):
            outcome = self._client.written_by_chief(path)
        if "error" in outcome:
            work = f"worker 0 to save the model for all workers, to {path!r}"
            raise WorkerLostError(self._said_elsewhere(work, 0, outcome["error"]))
        if not outcome:
            return False
        modified = outcome["modified"]
        # If this worker does not see the chief's file, there is no shared file system, and the
        # worker must write its own file.
        return modified is None or (_modified(path) or 0) >= modified

    def check(self) -> None:
        """Raises the error that ended the job, if there is one."""
        self._failing_exit = None  # the script runs on, so it has caught an earlier `sys.exit`
        if self._client.failure is not None:
            self._monitor.disarm()
            raise self._client.failure

    @property
    def is_watched(self) -> bool:
        """Whether this worker is in a call that needs all workers. Such calls have time-outs."""
        return bool(self._client.place)

    def step_started(self) -> None:
        """Counts a step that needs the other workers."""
        self.check()
        self._interrupts.raise_again()
        self._client.step += 1
        if self.collectives is not None and self._client.step % collectives.STEPS == 0:
            self.compare_collectives(f"step {self._client.step}")

    def compare_collectives(self, when: str) -> None:
        """Raises DisagreementError if collectives differ. All workers must call this method."""
        if self.collectives is None:
            return
        before, entries = self.collectives.take()
        label = f"collectives before {when}"
        at = self.first_difference(label, entries)
        if at is None:
            return
        self.collectives.taken = self.choose(f"number of {label}", self.collectives.taken, max)
        own = entries[at] if at < len(entries) else f"none, only {len(entries)} so far"
        self.assert_equal(label, {f"collective {before + at + 1}": own}, collectives.ADVICE)

    def report_batches(self, report: Callable[[], comparison.Report | None]) -> None:
        """Sends the result of `report` to the chief with each heartbeat, from now on."""
        self._client.report = report

    @contextmanager
    def translating_failures(self, place: str) -> Generator[None]:
        """Raises WorkerLostError in place of the errors that a lost worker causes in the block."""
        self.check()
        outer, self._client.place = self._client.place, self._client.place or place
        self._client.entered += 1
        try:
            yield
            if not outer:
                self._interrupts.raise_again()
        except KerasdistError:
            if self._client.failure is not None:
                self._monitor.disarm()
            raise
        except SystemExit as error:
            self._failing_exit = _failing_exit(error)
            raise
        except Exception as error:
            failure = self._client.failure_within(NEWS_SECONDS) if may_be_a_loss(error) else None
            if failure is None:
                raise
            self._monitor.disarm()
            raise failure from error
        finally:
            self._client.place = outer
            if not outer:
                self._interrupts.forget()

    def at_leave(self, callback: Callable[[], None]) -> None:
        """Adds a function to call when the scripts of all workers have ended."""
        self._at_leave.append(callback)

    def after_connecting(self) -> None:
        """Registers `leave` anew, so that it runs before the framework disconnects.

        Python calls functions at exit in the reverse order of their registration.

        At the end of the script, workers wait for each other before the framework disconnects. If a
        script ends with an uncaught error, or by ``sys.exit(3)`` in a call that needs all workers,
        its worker informs the others first.
        """
        if self._port is not None:
            self._port.release()
        atexit.unregister(self.leave)
        atexit.register(self.leave)
        self._monitor.put_hook_first()

    def leave(self) -> None:
        """Waits until all workers have ended their scripts, then leaves the job."""
        self._watch_over_leaving()
        self._client.close()
        if self._coordinator is not None:
            self._coordinator.wait_until_all_left(NEWS_SECONDS)
        self._monitor.hasten()

    def _watch_over_leaving(self) -> None:
        if self._client.closed or self._client.failure is not None:
            return
        if self._failing_exit is not None:
            self._monitor.fail(*self._failing_exit)
            return
        try:
            self._meet("end of the script", self._client.step, channel=LEAVING)
            self.compare_collectives("the end of the script")
        except JobError as error:
            self._monitor.end(error)
            return
        for callback in reversed(self._at_leave):
            callback()
        self._monitor.disarm()


# The name that messages give to a compiled step outside of `fit` and `strategy.run`.
FUNCTION = "kerasdist.function"

# The job of this process. There is at most one.
_current: list[Job] = []

_ALONE = nullcontext()


def join_job(membership: Membership, facts: Facts) -> tuple[Job, bool]:
    """Returns the job of this process, and whether this call has joined the job.

    All workers must call this function. A second strategy gets the job that the first strategy has
    joined.
    """
    if _current:
        if _current[0].membership != membership:
            raise JobError(
                "Expected one job for all strategies of a process. Received: "
                f"{membership}, after {_current[0].membership}. Make them with the same resolver."
            )
        return _current[0], False
    job = Job(membership, facts, Timeouts.of_environment())
    _current.append(job)
    return job, True


def current_job() -> Job | None:
    """Returns the job of this process; None if the process is the only worker."""
    return _current[0] if _current else None


def all_do(job: Job | None, label: str, failure: type[Exception]) -> AbstractContextManager[None]:
    """Returns ``job.all_do(label, failure)``; without a job, a context that does nothing."""
    return _ALONE if job is None else job.all_do(label, failure)


def everyone(job: Job | None, label: str, value: object) -> list[Any]:
    """Returns the values of all workers, by rank; without a job, only this process's value."""
    return [value] if job is None else job.all_gather_object(label, value)


def translating_failures(place: str) -> AbstractContextManager[None]:
    """Returns a context that raises WorkerLostError for the errors that a lost worker causes."""
    return _current[0].translating_failures(place) if _current else _ALONE


def _failing_exit(error: SystemExit) -> tuple[str, int] | None:
    """Returns the reason and exit code of a ``sys.exit``; None if it is not a failure."""
    match error.code:
        # PREEMPTED: all workers have saved a backup, and end together
        case None | 0 | ExitCode.PREEMPTED:
            return None
        case int(code):
            return f"exit code {code}", code
        case message:
            return f"exit code 1: {message}", 1


def _shortened(error: BaseException) -> str:
    """Returns the type and text of an error, cut short, for messages on other workers."""
    return f"{type(error).__name__}: {error}"[:500]


def _address_of_coordinator(membership: Membership) -> tuple[str, int]:
    if membership.coordinator is None:
        raise JobError(
            "Expected to know where the workers meet. Received: coordinator=None from "
            f"{membership.source}. Set KERASDIST_COORDINATOR=host:port, the same on all workers: "
            "a free port of the chief's machine."
        )
    host, port = split(membership.coordinator, "the coordinator's address")
    # If all workers are on one machine, no other machine needs to reach the coordinator, so a
    # loopback address is enough.
    alone = membership.local_workers == membership.num_workers and not membership.addresses
    return ("127.0.0.1" if alone or is_loopback(host) else host), port


def _warn_of_open_network(membership: Membership, host: str, port: int) -> None:
    sys.stderr.write(
        f"[worker 0/{membership.num_workers}] The network of this job is open: it has no secret, "
        f"so any process that reaches {host}:{port} can take part in it. Set {SECRET} to the same "
        "random text on all workers.\n"
    )


def sizes_of_hosts(workers: Sequence[tuple[str, int | None]]) -> list[int]:
    """Returns how many workers each machine has, given each worker's machine and local rank."""
    sizes: list[int] = []
    last: tuple[str, int | None] = "", None
    for host, number in workers:
        is_again = None not in (number, last[1]) and (number or 0) <= (last[1] or 0)
        if not sizes or host != last[0] or is_again:
            sizes.append(0)
        sizes[-1] += 1
        last = host, number
    return sizes


def _own_facts(membership: Membership, coordinator_host: str, port: HeldPort | None) -> Facts:
    facts: dict[str, object] = {
        "rank": membership.rank,
        "num_workers": membership.num_workers,
        "pid": os.getpid(),
        "host": platform.node(),
        "given": membership.addresses[membership.rank] if membership.addresses else None,
        "port": None if port is None else port.number,
    }
    # The chief may be connected to its own coordinator by a loopback address, which other workers
    # cannot use. So the chief's facts contain the coordinator's host as its address.
    return {**facts, "address": coordinator_host} if membership.is_chief else facts


def _modified(path: str) -> int | None:
    """Returns when a file was written, in nanoseconds; None if it does not exist."""
    try:
        return Path(path).stat().st_mtime_ns
    except FileNotFoundError:
        return None
