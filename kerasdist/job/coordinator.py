"""The chief's side of a job: knows which workers have joined, which wait, and which are lost.

The coordinator runs in a thread of the chief. Each worker, including the chief, has one connection
to the coordinator (see `kerasdist.job.client`).

The cost of most messages does not depend on the number of workers. Work that looks at all workers
is done about once a second, in `_patrol`, or once per exchange, when the last worker has come to
the exchange. Time is counted by the calls of `_patrol`. So a time-out does not run while this
process is suspended.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, final

from kerasdist.job import listening, protocol
from kerasdist.job.comparison import (
    ADVICE,
    Report,
    came_apart,
    check_report,
    named_places,
    named_workers,
)
from kerasdist.job.handshake import Credentials, Gate, read
from kerasdist.job.interruption import CTRL_C
from kerasdist.job.protocol import Facts, Timeouts

CHIEF = 0
MAIN = "main"
"""The channel of the exchanges that a script makes while it runs.

A channel is a series of exchanges that are numbered from 0.
"""

# The channel of the exchange to which all workers come at the end of the script.
LEAVING = "leaving"


# How long the chief waits before its process ends, so that the other workers can read its messages.
_DELIVERY_SECONDS = 0.3

# The errors that a malformed message causes.
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, RecursionError)


@dataclass(eq=False)
class Member:
    """The coordinator's facts about a worker.

    Attributes:
        rank: The number of the worker.
        name: The name of the worker in messages.
        writer: The connection to the worker.
        facts: The facts that the worker sent when it joined.
        heard: The time of the worker's last message.
        step: How many steps the worker has begun.
        place: The name of the running call, if it needs the other workers; otherwise empty.
        entered: How often the worker has entered a call that needs the other workers.
        moved: The time at which `step`, `place` or `entered` last changed.
        left: Whether the worker has left the job.
        batches: The worker's report on its batches since the last comparison; None if there is
            none.
        collectives: The last collectives that the worker has recorded.
    """

    rank: int
    name: str
    writer: asyncio.StreamWriter
    facts: Facts
    heard: float
    step: int = 0
    place: str = ""
    entered: int = 0
    moved: float = 0.0
    left: bool = False
    batches: Report | None = None
    collectives: list[str] = field(default_factory=list)

    def send(self, packed: bytes) -> None:
        """Sends a packed message, without waiting until the worker reads it."""
        if not self.left:
            self.writer.write(packed)


@dataclass(eq=False)
class Meeting:
    """An exchange of values (a meeting), to which all workers must come.

    Attributes:
        label: The name that the workers give to the exchange.
        since: The time at which the first worker came.
        wanted: Which values the workers get: `ALL`, `FOR_CHIEF` or `NUMBERS` of `job.protocol`.
        sent: The JSON text of the value that each worker sent.
        texts: Each different JSON text, as key and as value, so that equal texts are stored once.
        size: The total length of the different texts.
    """

    label: str
    since: float
    wanted: str
    sent: dict[int, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    size: int = 0

    @property
    def places(self) -> dict[int, str]:
        """Where each worker of this exchange waits, in words for a message, by rank."""
        return dict.fromkeys(self.sent, f"at {self.label!r}")

    def add(self, rank: int, value: object) -> None:
        """Adds the value that a worker has sent to the exchange."""
        text = json.dumps(value)
        if text not in self.texts:
            self.size += len(text)
        self.sent[rank] = self.texts.setdefault(text, text)

    def answer(self, channel: str, number: int, workers: int) -> bytes:
        """Returns the message to the workers: each value once, and which workers sent the value.

        Each item of ``runs`` in the message stands for some workers with consecutive ranks that
        have sent the same value. It has the index of that value, and the number of these workers.
        """
        texts = [self.sent[rank] for rank in range(workers)]
        index = {text: at for at, text in enumerate(dict.fromkeys(texts))}
        runs = [[index[text], len(list(ranks))] for text, ranks in groupby(texts)]
        numbers = self.wanted == protocol.NUMBERS
        values = list(index.values() if numbers else map(json.loads, index))
        kept = {"channel": channel, "number": number, "values": values, "runs": runs}
        return protocol.packed({"type": "met", **kept})


# For how many steps the coordinator remembers which files the chief has written.
_KEPT_STEPS = 1000


@final
@dataclass(frozen=True)
class Save:
    """A worker's question, before it saves a file, whether the chief has written this file.

    The worker cannot know whether the chief saves the file too, because a script may let only some
    workers save.

    Attributes:
        rank: The number of the worker.
        number: The number of the worker's question.
        step: How many steps the worker had begun.
        path: The path of the file.
        occurrence: How many earlier saves to this path the worker has made in this step.
        index: How many earlier saves to any path the worker has made in this step.
        since: The time at which the worker began to wait.
    """

    rank: int
    number: int
    step: int
    path: str
    occurrence: int
    index: int
    since: float


@final
class Coordinator:
    """Admits workers, exchanges their values, and tells all workers when one of them is lost."""

    def __init__(
        self, host: str, port: int, workers: int, timeouts: Timeouts, credentials: Credentials
    ) -> None:
        self._workers = workers
        self._timeouts = timeouts
        self._members: dict[int, Member] = {}
        self._meetings: dict[tuple[str, int], Meeting] = {}
        # For each step and path, what the chief has reported after each write: the file's time of
        # modification, or an error.
        self._written: dict[int, dict[str, list[Facts]]] = {}
        self._waiting: list[Save] = []
        # While the coordinator asks where the workers can meet: their answers by rank. An answer is
        # the number of the worker's next call of `Client.meets_here`. None while nothing is asked.
        self._next_places: dict[int, int] | None = None
        self._failed = False
        self._left = 0
        # How many seconds this process had run at the last call of `_patrol`. Time in which the
        # process was suspended does not count.
        self._now = 0.0
        self._ended = threading.Event()
        self._told = threading.Event()
        self._gate = Gate(credentials, workers, f"[worker 0/{workers}]")
        listening.require_file_descriptors(workers)
        self._socket = listening.listen(host, port)
        threading.Thread(target=self._serve, name="kerasdist-coordinator", daemon=True).start()

    def wait_until_all_left(self, seconds: float) -> None:
        """Waits until all workers have left the job, at most for `seconds`."""
        self._ended.wait(seconds)

    def wait_until_told(self, seconds: float) -> None:
        """Waits until the workers have learned why the job has failed.

        If the chief ended earlier, the workers would learn only that the chief has ended.
        """
        if self._told.wait(seconds):
            time.sleep(_DELIVERY_SECONDS)

    def _serve(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        server = await asyncio.start_server(
            self._welcome, sock=self._socket, backlog=listening.BACKLOG
        )
        async with server:
            while not self._ended.is_set():
                self._patrol()
                await asyncio.sleep(self._timeouts.beat)

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        member = None
        try:
            if not await self._gate.admits(reader, writer):
                return
            hello = await asyncio.wait_for(read(reader), self._timeouts.join)
            member = self._admitted(hello, writer)
            while member is not None and not member.left:
                self._hear(member, await read(reader))
        except (protocol.MalformedError, *_MALFORMED) as error:
            why = f"it sent a malformed message ({error!r})"
            if member is None:
                writer.write(_refusal(f"this worker was refused: {why}"))
            self._lose(member, f"{why}. All workers must run the same kerasdist, unchanged")
        except (OSError, EOFError) as error:
            closed = "closed" if isinstance(error, EOFError) else str(error) or repr(error)
            self._lose(member, f"its connection ended ({closed}): it was killed")
        finally:
            writer.close()

    def _admitted(self, hello: Any, writer: asyncio.StreamWriter) -> Member | None:
        """Returns the worker that a new connection belongs to; None if the worker is refused."""
        rank = hello["rank"]
        name = f"worker {rank} (process {hello['pid']} on {hello['host']})"
        if not isinstance(hello.get("given"), str | None):
            raise TypeError(f"given={hello['given']!r}")
        why = None
        is_rank = type(rank) is int and rank in range(self._workers)
        if not is_rank or hello["num_workers"] != self._workers:
            why = (
                f"the chief expects {self._workers} workers, and this one calls itself number "
                f"{rank} of {hello['num_workers']}"
            )
        elif rank in self._members:
            there = self._members[rank].name
            why = f"its rank is taken by {there}. Each worker needs a rank of its own"
        if why is not None:
            writer.write(_refusal(f"{name} was refused: {why}"))
            return None
        member = Member(rank, name, writer, hello, heard=self._now, moved=self._now)
        self._members[rank] = member
        if len(self._members) == self._workers:
            self._tell_all(self._roster())
        return member

    def _roster(self) -> dict[str, object]:
        """Returns the message that gives each worker some facts about all workers.

        The result has at most two addresses, however many workers there are: the chief's, and that
        of one worker on another machine.
        """
        facts = [self._members[rank].facts for rank in range(self._workers)]
        addresses = list(map(listening.address_in, facts))
        far = (one for one in addresses[1:] if not listening.leads_here(one))
        return {
            "type": "roster",
            "chief": addresses[0],
            "far": next(far, None),
            "on_one_machine": all(map(listening.leads_here, addresses)),
        }

    def _hear(self, member: Member, message: Any) -> None:
        member.heard = self._now
        match message["type"]:
            case "beat":
                self._hear_beat(member, message)
            case "meet":
                self._meet(member, message)
            case "ask":
                if self._next_places is None:  # otherwise the workers are being asked already
                    self._next_places = {}
                    self._tell_all({"type": "asked"})
            case "next":
                self._add_next_place(member, message["place"])
            case "wrote":
                in_step = self._written.setdefault(message["step"], {})
                in_step.setdefault(message["path"], []).append(message["outcome"])
                if len(self._written) > _KEPT_STEPS:
                    del self._written[next(iter(self._written))]
                self._answer_waiting()
            case "save":
                del message["type"]
                self._answer(Save(rank=member.rank, since=self._now, **message))
            case "bye":
                error = message["error"]
                self._leave(member)
                if error is not None:
                    kind = "interrupted" if error == CTRL_C else "lost"
                    self._fail_lost(member.rank, f"it ended with {error}", kind)
            case other:
                raise protocol.MalformedError(f"not a kerasdist worker: it says {other!r}")

    def _hear_beat(self, member: Member, message: Any) -> None:
        step, place, entered = message["doing"]
        if (type(step), type(place), type(entered)) != (int, str, int):
            raise TypeError(f"doing={message['doing']!r}")
        if message["batches"] is not None:
            check_report(message["batches"])
        member.batches = message["batches"]
        member.collectives = list(map(str, message.get("collectives", ())))
        if (step, place, entered) != (member.step, member.place, member.entered):
            member.moved = self._now
            member.step, member.place, member.entered = step, place, entered
            if member.rank == CHIEF:
                self._answer_waiting()

    def _add_next_place(self, member: Member, place: Any) -> None:
        """Stores a worker's answer to the question where workers can meet.

        `place` is the number of the worker's next call of `Client.meets_here`. After the last
        answer, this method tells all workers to meet at the highest of these numbers.
        """
        if type(place) is not int or self._next_places is None:
            raise TypeError(f"place={place!r}")
        self._next_places[member.rank] = place
        if len(self._next_places) == self._workers:
            self._tell_all({"type": "meet at", "place": max(self._next_places.values())})
            self._next_places = None

    def _answer_waiting(self) -> None:
        """Tries again to answer workers that have asked whether the chief has written a file."""
        waiting, self._waiting = self._waiting, []
        for save in waiting:
            self._answer(save)

    def _answer(self, save: Save) -> None:
        """Answers a worker that asks whether the chief has written a file.

        As long as the answer is not known, the question is kept, and the worker waits. An empty
        answer means that the chief does not write the file; the worker then writes it itself.
        """
        in_step = self._written.get(save.step, {})
        outcomes = in_step.get(save.path, [])
        if len(outcomes) > save.occurrence:
            outcome = outcomes[save.occurrence]
        elif (
            # The chief has saved another file instead, has begun a later step, or waits for this
            # worker.
            sum(map(len, in_step.values())) > save.index
            or self._members[CHIEF].step > save.step
            or self._chief_waits_for(save.rank)
        ):
            outcome = {}
        else:
            self._waiting.append(save)
            return
        kept = {"channel": protocol.SAVES, "number": save.number, "values": [outcome]}
        self._members[save.rank].send(protocol.packed({"type": "met", **kept, "runs": [[0, 1]]}))

    def _chief_waits_for(self, rank: int) -> bool:
        return any(
            CHIEF in meeting.sent and rank not in meeting.sent
            for (channel, _), meeting in self._meetings.items()
            if channel in (MAIN, LEAVING)
        )

    def _meet(self, member: Member, message: Any) -> None:
        channel, number = key = message["channel"], message["number"]
        label, value = message["label"], message["value"]
        if channel == LEAVING and type(value) is not int:
            raise TypeError(f"value={value!r} at {label!r}")
        if key not in self._meetings:
            self._meetings[key] = Meeting(label, self._now, message.get("wanted", protocol.ALL))
        meeting = self._meetings[key]
        if label != meeting.label:
            self._fail_apart(member, label, meeting)
            return
        meeting.add(member.rank, value)
        if meeting.size > protocol.MAX_BYTES:
            self._fail_too_large(meeting)
        elif len(meeting.sent) == self._workers:
            del self._meetings[key]
            self._conclude(channel, number, meeting)
        elif member.rank == CHIEF:
            self._answer_waiting()

    def _conclude(self, channel: str, number: int, meeting: Meeting) -> None:
        """Answers all workers of an exchange, after the last one has come."""
        answer = meeting.answer(channel, number, self._workers)
        for_others = answer
        if meeting.wanted == protocol.FOR_CHIEF:
            kept = {"channel": channel, "number": number, "values": [], "runs": []}
            for_others = protocol.packed({"type": "met", **kept})
        for member in self._members.values():
            member.send(answer if member.rank == CHIEF else for_others)

    def _check_leavers(self) -> None:
        """Fails the job if one worker's script has ended while other workers continue."""
        leaving = next((one for key, one in self._meetings.items() if key[0] == LEAVING), None)
        if leaving is None:
            return
        ended = min(map(json.loads, leaving.texts))
        places = {
            one.rank: f"at 'step {one.step} of {one.place}'"
            for one in self._members.values()
            if one.place and one.step > ended
        }
        for meeting in self._meetings.values():
            if meeting is not leaving:
                places |= meeting.places
        if places:
            self._fail_lost(
                min(leaving.sent),
                f"it came to the end of its script, but {named_places(places)}. If no error ended "
                "the script, the workers differ: all must run the same script with the same number "
                "of batches",
                kind="left early",
            )

    def _leave(self, member: Member) -> None:
        """Records that a worker has left. After the last worker has left, the coordinator ends."""
        member.left = True
        self._left += 1
        if self._left == self._workers:
            self._ended.set()

    def _patrol(self) -> None:
        """Checks all workers; called every `Timeouts.beat` seconds."""
        self._now += self._timeouts.beat
        now, limits = self._now, self._timeouts
        self._tell_all({"type": "beat"})
        if len(self._members) < self._workers:
            if now > limits.join:
                absent = [rank for rank in range(self._workers) if rank not in self._members]
                self._fail(
                    "lost",
                    f"{named_workers(absent)} of {self._workers} did not come within "
                    f"{limits.join:g} s. Look for an error in their logs, start them, or give them "
                    "more time (KERASDIST_JOIN_TIMEOUT)",
                )
            return
        for member in self._members.values():
            if not member.left and now - member.heard > limits.heartbeat:
                self._fail_lost(
                    member.rank,
                    f"it has not given a sign of life for {limits.heartbeat:g} s: it was stopped, "
                    "or is cut off from the network (KERASDIST_HEARTBEAT_TIMEOUT)",
                )
        for meeting in self._meetings.values():
            if now - meeting.since > limits.meeting:
                self._fail_absent(meeting)
        self._check_leavers()
        self._check_savers(now)
        self._check_progress(now)
        self._check_batches()

    def _check_savers(self, now: float) -> None:
        """Fails the job if a worker has waited too long for the chief to write a file."""
        limit = self._timeouts.meeting
        save = next((one for one in self._waiting if now - one.since > limit), None)
        if save is not None:
            self._fail(
                "lost",
                f"worker {CHIEF} did not save {save.path!r} within {limit:g} s, "
                f"for which worker {save.rank} waited ({named_places(self._doing([CHIEF]))}). "
                "Raise KERASDIST_MEETING_TIMEOUT if the save needs so long",
            )

    def _check_progress(self, now: float) -> None:
        """Fails the job if no worker has begun a step for too long."""
        busy = [one for one in self._members.values() if one.place and not one.left]
        if not busy or any(now - one.moved <= self._timeouts.meeting for one in busy):
            return
        last = min(self._members.values(), key=lambda one: one.step)
        self._fail(
            "lost",
            f"no worker has begun a step for {self._timeouts.meeting:g} s "
            f"({named_places(self._doing(one.rank for one in busy))}); the last is {last.name}. "
            "If a step takes that long, raise KERASDIST_MEETING_TIMEOUT",
        )

    def _check_batches(self) -> None:
        """Fails the job if workers train on batches of different shapes, types or numbers."""
        members = [self._members[rank] for rank in range(self._workers)]
        begun = max(one.moved for one in members)
        idle = self._now - begun > self._timeouts.heartbeat
        said = came_apart([one.batches for one in members], idle=idle)
        if said is not None:
            self._fail(
                "disagree", f"the workers do not train on the same batches: {said}. {ADVICE}"
            )

    def _fail_absent(self, meeting: Meeting) -> None:
        absent = [rank for rank in range(self._workers) if rank not in meeting.sent]
        self._fail(
            "lost",
            f"{named_workers(absent)} did not come to {meeting.label!r} within "
            f"{self._timeouts.meeting:g} s, where {named_workers(sorted(meeting.sent))} waited "
            f"({named_places(self._doing(absent))}). All workers must run the same script; raise "
            "KERASDIST_MEETING_TIMEOUT if they need so long",
        )

    def _doing(self, ranks: Iterable[int]) -> dict[int, str]:
        """Returns, in words for a message, what each of these workers does now, by rank."""
        places: dict[int, str] = {}
        for one in (self._members[rank] for rank in ranks):
            place = f"in {one.place}, step {one.step}" if one.place else "in code of its own"
            recorded = "; ".join(one.collectives)
            places[one.rank] = f"{place}, last collectives: {recorded}" if recorded else place
        return places

    def _fail_apart(self, member: Member, label: str, meeting: Meeting) -> None:
        places = {**meeting.places, member.rank: f"at {label!r}"}
        self._fail(
            "disagree",
            f"the workers have come apart: {named_places(places)}. All of them must run the same "
            "script with the same number of batches",
        )

    def _fail_too_large(self, meeting: Meeting) -> None:
        self._fail(
            "too large",
            f"the values of {len(meeting.sent)} workers at {meeting.label!r} come to "
            f"{meeting.size} bytes, and {protocol.MAX_BYTES} are the limit. Exchange digests or "
            "small facts; tensors go by the collectives of the framework",
        )

    def _lose(self, member: Member | None, why: str) -> None:
        """Fails the job because a worker's connection has failed, unless the worker has left."""
        if member is not None and not member.left:
            self._leave(member)
            self._fail_lost(member.rank, why)

    def _fail_lost(self, rank: int, why: str, kind: str = "lost") -> None:
        self._fail(kind, f"{self._members[rank].name} is lost: {why}")

    def _fail(self, kind: str, why: str) -> None:
        if not self._failed:
            self._failed = True
            self._tell_all({"type": "failure", "kind": kind, "why": why})
            self._told.set()

    def _tell_all(self, message: object) -> None:
        packed = protocol.packed(message)
        for member in self._members.values():
            member.send(packed)


def _refusal(why: str) -> bytes:
    return protocol.packed({"type": "refused", "why": why})
