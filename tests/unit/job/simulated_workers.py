"""Workers of a job in one thread: they speak the protocol, and do nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Mapping
from typing import Any

from kerasdist.job import handshake, protocol
from kerasdist.job.coordinator import Coordinator
from kerasdist.job.handshake import Credentials
from kerasdist.job.protocol import Timeouts

MINE = Credentials(b"a secret", "a job")
PATIENT = Timeouts(join=120.0, heartbeat=120.0, meeting=120.0)


class SimulatedWorker:
    def __init__(self, rank: int, workers: int, known: Credentials, facts: Mapping[str, Any] = {}):
        self.rank = rank
        self.heard = 0  # bytes of messages
        self._known = known
        self._hello = {"type": "hello", "rank": rank, "num_workers": workers, "pid": rank}
        self._hello |= {"host": f"node{rank}", "address": "127.0.0.1", "port": 1, "given": None}
        self._hello |= facts

    async def connect(self, port: int):
        """Joins; the roster comes when all have joined."""
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
        self._writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        asked = await handshake.read(self._reader)
        answered = handshake.answer(asked, self._known)
        self.say(answered)
        handshake.check_proof(asked, answered, await handshake.read(self._reader), self._known)
        self.say(self._hello)

    def say(self, message: Mapping[str, Any]):
        self._writer.write(protocol.packed(message))

    def meet(self, number: int, label: str, value: Any, channel: str = "main", **more: Any):
        told = {"channel": channel, "number": number, "label": label, "value": value, **more}
        self.say({"type": "meet", **told})

    def beat(self, step: int = 0, place: str = "", batches: Any = None):
        self.say({"type": "beat", "doing": [step, place, int(bool(place))], "batches": batches})

    async def hear(self) -> Any:
        """Returns the next message that is no sign of life."""
        while True:
            message = await handshake.read(self._reader)
            if message != {"type": "beat"}:
                self.heard += len(protocol.packed(message))
                return message

    async def close(self):
        self._writer.close()
        with contextlib.suppress(OSError):  # the other side was faster
            await self._writer.wait_closed()


class Wire:
    """What a member's connection is told."""

    def __init__(self):
        self.bytes = 0

    def write(self, data: bytes):
        self.bytes += len(data)


class InMemory:
    """A coordinator without connections: a test hands it the messages."""

    def __init__(self, workers: int, monkeypatch):
        monkeypatch.setattr(Coordinator, "_serve", lambda self: None)
        self.coordinator = Coordinator("127.0.0.1", 0, workers, PATIENT, MINE)
        self.coordinator._socket.close()
        self.wires = [Wire() for _ in range(workers)]
        hello = {"num_workers": workers, "pid": 1, "host": "here", "given": None}
        self.members = [
            self.coordinator._admitted({"rank": rank, **hello}, wire)
            for rank, wire in enumerate(self.wires)
        ]

    def hear(self, rank: int, kind: str, **message):
        self.coordinator._hear(self.members[rank], {"type": kind, **message})

    def beat(self, rank: int, step: int = 0, place: str = "fit"):
        changes = [[0, "32"], [8, "17"]]
        batches = {"stretch": 1, "steps": step, "begun": step, "changes": changes}
        self.hear(rank, "beat", doing=[step, place, 1], batches=batches)

    def meet(self, rank: int, number: int, channel: str = "main", value: object = 3):
        self.hear(rank, "meet", channel=channel, number=number, label="a call", value=value)

    def save(self, rank: int, step: int):
        self.hear(rank, "save", number=1, step=step, path="m", occurrence=0, index=0)

    def patrol(self):
        self.coordinator._patrol()


def values_in(message: Mapping[str, Any]) -> list[Any]:
    return [message["values"][index] for index, count in message["runs"] for _ in range(count)]


class CountedLines:
    """How many lines of a folder run in a block, so that loops in one line count too."""

    def __init__(self, folder: str):
        self._folder = folder
        self.lines = 0

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._entered)
        return self

    def __exit__(self, *error: object):
        sys.settrace(self._before)

    def _entered(self, frame: Any, event: str, argument: object):
        return self._count if self._folder in frame.f_code.co_filename else None

    def _count(self, frame: Any, event: str, argument: object):
        self.lines += event == "line"
        return self._count
