"""The chief's side of a job: which workers are there, which wait, and which are lost.

It runs in a thread of the chief. Each worker, the chief too, holds one connection to it (see
`kerasdist.job.client`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from kerasdist.job import listening, protocol
from kerasdist.job.batches import ADVICE, came_apart
from kerasdist.job.gate import Gate, read
from kerasdist.job.interruption import CTRL_C
from kerasdist.job.saves import CHANNEL, Save, Saves
from kerasdist.job.secret import Credentials
from kerasdist.job.timeouts import Timeouts

CHIEF = 0
MAIN = "main"
"""The channel of the script's own thread."""

# The channel of the meeting at the end of the script.
LEAVING = "leaving"


# The workers must read the message before the connection ends, which would discard it.
_DELIVERY_SECONDS = 0.3


@dataclass(eq=False)
class Member:
    """A worker as the coordinator knows it.

    Attributes:
        rank: Its number.
        name: Its name in messages.
        writer: The connection to it.
        facts: What it told of itself when it joined.
        heard: When it last gave a sign of life.
        step: How many steps it has begun.
        place: The call that needs the others; empty outside of one.
        entered: How often it has entered such a call.
        moved: When `step`, `place` or `entered` last changed.
        left: Whether it has left the job.
        batches: Its batches since the workers last compared them; None if it does not tell.
    """

    rank: int
    name: str
    writer: asyncio.StreamWriter
    facts: dict[str, Any]
    heard: float
    step: int = 0
    place: str = ""
    entered: int = 0
    moved: float = 0.0
    left: bool = False
    batches: Mapping[str, Any] | None = None

    def tell(self, message: Any) -> None:
        """Sends a message; does not wait until the worker reads it."""
        if not self.left:
            self.writer.write(protocol.packed(message))


@dataclass(eq=False)
class Meeting:
    """A call that all workers must make.

    Attributes:
        since: When the first worker made it.
        labels: The name that each worker gives to the call.
        values: The value that each worker sent.
    """

    since: float
    labels: dict[int, str] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)


@final
class Coordinator:
    """Admits workers, exchanges their values at meetings, and tells all when one is lost."""

    def __init__(
        self, host: str, port: int, workers: int, timeouts: Timeouts, credentials: Credentials
    ) -> None:
        self._workers = workers
        self._timeouts = timeouts
        self._members: dict[int, Member] = {}
        self._meetings: dict[tuple[str, int], Meeting] = {}
        self._saves = Saves()
        self._failed = False
        self._started = time.monotonic()
        self._ended = threading.Event()
        self._told = threading.Event()
        self._gate = Gate(credentials, workers)
        self._socket = listening.listen(host, port)
        threading.Thread(target=self._serve, name="kerasdist-coordinator", daemon=True).start()

    def wait_until_all_left(self, seconds: float) -> None:
        """Waits until all workers have left."""
        self._ended.wait(seconds)

    def wait_until_told(self, seconds: float) -> None:
        """Waits until the workers know why the job has failed.

        If the chief ended before, they would only learn that the chief has ended.
        """
        if self._told.wait(seconds):
            time.sleep(_DELIVERY_SECONDS)

    def _serve(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        server = await asyncio.start_server(self._welcome, sock=self._socket)
        async with server:
            while not self._ended.is_set():
                self._patrol()
                await asyncio.sleep(min(1.0, self._timeouts.heartbeat / 4))

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        member = None
        try:
            if not await self._gate.admits(reader, writer):
                return
            hello = await asyncio.wait_for(read(reader), self._timeouts.join)
            member = self._admitted(hello, writer)
            while member is not None and not member.left:
                self._hear(member, await read(reader))
        except (OSError, EOFError, TimeoutError, KeyError, TypeError) as error:
            if member is not None and not member.left:
                member.left = True
                self._fail_lost(member.rank, f"its connection ended ({_why(error)}): it was killed")
                self._check_all_left()
        finally:
            writer.close()

    def _admitted(self, hello: Any, writer: asyncio.StreamWriter) -> Member | None:
        """Returns the worker of a new connection, None if it is refused."""
        rank: int = hello["rank"]
        name = f"worker {rank} (process {hello['pid']} on {hello['host']})"
        now = time.monotonic()
        member = Member(rank, name, writer, hello, heard=now, moved=now)
        there = self._members.get(rank)
        why = None
        if hello["num_workers"] != self._workers or not 0 <= rank < self._workers:
            why = (
                f"the chief expects {self._workers} workers, and this one calls itself number "
                f"{rank} of {hello['num_workers']}"
            )
        elif there is not None:
            why = f"there is one already: {there.name}. Each worker needs a rank of its own"
        if why is not None:
            member.tell({"type": "refused", "why": f"{name} was refused: {why}"})
            return None
        self._members[rank] = member
        if len(self._members) == self._workers:
            everyone = [self._members[rank].facts for rank in range(self._workers)]
            self._tell_all({"type": "roster", "members": everyone})
        return member

    def _hear(self, member: Member, message: Any) -> None:
        member.heard = time.monotonic()
        match message["type"]:
            case "beat":
                if message["doing"] != [member.step, member.place, member.entered]:
                    member.moved = member.heard
                member.step, member.place, member.entered = message["doing"]
                member.batches = message["batches"]
                self._check_leavers()
            case "meet":
                self._meet(member, message)
            case "wrote":
                self._saves.wrote(message["step"], message["path"], message["outcome"])
            case "save":
                del message["type"]
                self._saves.wait(Save(rank=member.rank, since=member.heard, **message))
            case "bye":
                member.left = True
                error = message["error"]
                if error is not None:
                    kind = "interrupted" if error == CTRL_C else "lost"
                    self._fail_lost(member.rank, f"it ended with {error}", kind)
                self._check_all_left()
            case other:
                raise ConnectionError(f"not a kerasdist worker: it says {other!r}")
        self._answer_savers()

    def _answer_savers(self) -> None:
        """Answers workers that wait for a file of the chief."""
        everyone = frozenset(self._members)
        chief_waits_for = frozenset[int]().union(
            *(
                everyone - meeting.labels.keys()
                for (channel, _), meeting in self._meetings.items()
                if channel in (MAIN, LEAVING) and CHIEF in meeting.labels
            )
        )
        for save, outcome in self._saves.answers(self._members[CHIEF].step, chief_waits_for):
            kept = {"channel": CHANNEL, "number": save.number, "values": [outcome]}
            self._members[save.rank].tell({"type": "met", **kept})

    def _meet(self, member: Member, message: Any) -> None:
        key = message["channel"], message["number"]
        meeting = self._meetings.setdefault(key, Meeting(member.heard))
        meeting.labels[member.rank] = message["label"]
        meeting.values[member.rank] = message["value"]
        if len(set(meeting.labels.values())) > 1:
            self._fail_apart(meeting.labels)
        elif len(meeting.values) == self._workers:
            del self._meetings[key]
            values = [meeting.values[rank] for rank in range(self._workers)]
            kept = {"channel": key[0], "number": key[1], "values": values}
            self._tell_all({"type": "met", **kept})
        self._check_leavers()

    def _check_leavers(self) -> None:
        """Fails the job if a worker has ended its script while others go on."""
        waiting = {key[0] == LEAVING: one for key, one in self._meetings.items()}
        if True not in waiting:
            return
        leaving = waiting[True]
        others = waiting[False].labels if False in waiting else {}
        ahead = {
            one.rank: f"step {one.step} of {one.place}"
            for one in self._members.values()
            if one.place and one.step > min(leaving.values.values())
        }
        if others or ahead:
            places = {**ahead, **others}
            self._fail_lost(
                min(leaving.labels),
                f"it came to the end of its script, but {_places(places)}. If no error ended it, "
                "the workers differ: all of them must run the same script with the same number of "
                "batches",
                kind="left early",
            )

    def _check_all_left(self) -> None:
        """Ends the coordinator after the last worker has left."""
        everyone = self._members.values()
        if len(everyone) == self._workers and all(one.left for one in everyone):
            self._ended.set()

    def _patrol(self) -> None:
        now, limits = time.monotonic(), self._timeouts
        self._tell_all({"type": "beat"})
        if len(self._members) < self._workers:
            if now - self._started > limits.join:
                absent = [rank for rank in range(self._workers) if rank not in self._members]
                self._fail(
                    "lost",
                    absent[0],
                    f"{_workers(absent)} of {self._workers} did not come within {limits.join:g} s. "
                    "Look for an error in their logs, start them, or give them more time "
                    "(KERASDIST_JOIN_TIMEOUT)",
                )
            return
        for member in self._members.values():
            if not member.left and now - member.heard > limits.heartbeat:
                self._fail_lost(
                    member.rank,
                    f"it has not given a sign of life for {limits.heartbeat:g} s: it was stopped, "
                    "or is cut off from the network (KERASDIST_HEARTBEAT_TIMEOUT)",
                )
        for meeting in list(self._meetings.values()):
            if now - meeting.since > limits.meeting:
                self._fail_absent(meeting)
        self._check_savers(now)
        self._check_progress(now)
        self._check_batches()

    def _check_savers(self, now: float) -> None:
        """Fails the job if a worker has waited too long for a file of the chief."""
        save = self._saves.overdue(now - self._timeouts.meeting)
        if save is not None:
            self._fail(
                "lost",
                CHIEF,
                f"worker {CHIEF} did not save {save.path!r} within {self._timeouts.meeting:g} s, "
                f"for which worker {save.rank} waited (worker {CHIEF} is {self._doing(CHIEF)}). "
                "Raise KERASDIST_MEETING_TIMEOUT if it needs so long",
            )

    def _check_progress(self, now: float) -> None:
        """Fails the job if no worker has begun a step for too long."""
        busy = [one for one in self._members.values() if one.place and not one.left]
        if not busy or any(now - one.moved <= self._timeouts.meeting for one in busy):
            return
        last = min(self._members.values(), key=lambda one: one.step)
        places = ", ".join(f"worker {one.rank} in {one.place}, step {one.step}" for one in busy)
        self._fail(
            "lost",
            last.rank,
            f"no worker has begun a step for {self._timeouts.meeting:g} s ({places}); the last is "
            f"{last.name}. If a step takes that long, raise KERASDIST_MEETING_TIMEOUT",
        )

    def _check_batches(self) -> None:
        """Fails the job if workers train on batches of different sizes."""
        said = came_apart([self._members[rank].batches for rank in range(self._workers)])
        if said is not None:
            self._fail(
                "disagree",
                CHIEF,
                f"the workers do not train on the same batches: {said}. {ADVICE}",
            )

    def _fail_absent(self, meeting: Meeting) -> None:
        absent = [rank for rank in range(self._workers) if rank not in meeting.labels]
        label = next(iter(meeting.labels.values()))
        doing = "; ".join(f"worker {rank} is {self._doing(rank)}" for rank in absent)
        self._fail(
            "lost",
            absent[0],
            f"{_workers(absent)} did not come to {label!r} within {self._timeouts.meeting:g} s, "
            f"where {_workers(sorted(meeting.labels))} waited ({doing}). All workers must run the "
            "same script; raise KERASDIST_MEETING_TIMEOUT if they need so long",
        )

    def _doing(self, rank: int) -> str:
        member = self._members[rank]
        return f"in {member.place}, step {member.step}" if member.place else "in code of its own"

    def _fail_apart(self, labels: Mapping[int, str]) -> None:
        ranks = sorted(labels)
        other = next(rank for rank in ranks if labels[rank] != labels[ranks[0]])
        self._fail(
            "disagree",
            other,
            f"the workers have come apart: {_places(labels)}. All of them must run the same script "
            "with the same number of batches",
        )

    def _fail_lost(self, rank: int, why: str, kind: str = "lost") -> None:
        self._fail(kind, rank, f"{self._members[rank].name} is lost: {why}")

    def _fail(self, kind: str, rank: int, why: str) -> None:
        if not self._failed:
            self._failed = True
            self._tell_all({"type": "failure", "kind": kind, "rank": rank, "why": why})
            self._told.set()

    def _tell_all(self, message: Any) -> None:
        for member in self._members.values():
            member.tell(message)


def _why(error: Exception) -> str:
    match error:
        case EOFError():
            return "closed"
        case KeyError() | TypeError():
            return f"not a kerasdist worker: its message is malformed, {error!r}"
        case _:
            return str(error) or type(error).__name__


def _places(labels: Mapping[int, str]) -> str:
    return "; ".join(f"worker {rank} is at {labels[rank]!r}" for rank in sorted(labels))


def _workers(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks))
    return f"worker {named}" if len(ranks) == 1 else f"workers {named}"
