"""Workers of a job in one thread: they speak the protocol, and do nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping
from typing import Any

from kerasdist.job import handshake, protocol
from kerasdist.job.secret import Credentials


class SimulatedWorker:
    """A connection to the coordinator.

    Attributes:
        rank: Its number.
        heard: How many bytes of messages it has read.
    """

    def __init__(self, rank: int, workers: int, known: Credentials, facts: Mapping[str, Any] = {}):
        self.rank = rank
        self.heard = 0
        self._known = known
        self._hello = {"type": "hello", "rank": rank, "num_workers": workers, "pid": rank}
        self._hello |= {"host": f"node{rank}", "address": "127.0.0.1", "port": 1, "given": None}
        self._hello |= {"python": "x", **facts}

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


def values_in(message: Mapping[str, Any]) -> list[Any]:
    """Returns by rank what a meeting's answer says, as `Client` does."""
    return [message["values"][index] for index, count in message["runs"] for _ in range(count)]
