"""Messages between workers, JSON behind its length, and how long they wait for each other.

Small facts only, never a tensor.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kerasdist.errors import JobError

# Of the protocol between workers; they must be equal.
VERSION = 3

HEADER_BYTES = 4

MAX_BYTES = 64 * 1024 * 1024
"""The most that workers may exchange at once: a large model's variables are a few 100 KB."""

# What an exchange gives: the values of all; the same, but to the chief alone; or a number for each
# value, which says who sent the same.
ALL, FOR_CHIEF, NUMBERS = "all", "for chief", "numbers"

# What else is in the largest message: some bytes for each worker.
_FRAME_BYTES = MAX_BYTES + 1024 * 1024


class MalformedError(ConnectionError):
    """A message is not of the form that workers send."""


def packed(message: Any) -> bytes:
    """Returns the bytes of a message."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > _FRAME_BYTES:
        raise ValueError(
            f"Expected a message of at most {_FRAME_BYTES} bytes. Received: {len(body)} bytes. "
            "Send tensors by collectives."
        )
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def body_size(header: bytes, most: int = _FRAME_BYTES) -> int:
    """Returns the size of the body that a header announces."""
    size = int.from_bytes(header, "big")
    if size > most:
        raise MalformedError(f"not a kerasdist worker: it announces {size} bytes")
    return size


def unpacked(body: bytes) -> Any:
    """Returns the message that a body encodes."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedError("not a kerasdist worker: its message is no JSON") from error


def receive(connection: socket.socket, most: int = _FRAME_BYTES) -> Any:
    """Waits for a message on a socket, and returns it."""
    return unpacked(_exactly(connection, body_size(_exactly(connection, HEADER_BYTES), most)))


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return bytes(data)


@dataclass(frozen=True)
class Timeouts:
    """How long a worker waits before it ends the job with an error; all in seconds.

    Attributes:
        join: For all workers to come, at the start.
        heartbeat: For a sign of life of a worker.
        meeting: For the others at a place that all must come to: a decision, the next step, the end
            of the script. Also how long an engine waits in a collective.
    """

    join: float = 300.0
    heartbeat: float = 60.0
    meeting: float = 600.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(
                    f"Expected a positive number of seconds. Received: {field.name}="
                    f"{getattr(self, field.name)!r}."
                )

    @property
    def beat(self) -> float:
        """Seconds from one sign of life to the next."""
        return min(1.0, self.heartbeat / 4)

    @classmethod
    def of_environment(cls, environ: Mapping[str, str] = os.environ) -> Timeouts:
        """Reads ``KERASDIST_JOIN_TIMEOUT``, ``_HEARTBEAT_TIMEOUT`` and ``_MEETING_TIMEOUT``."""
        given: dict[str, float] = {}
        for field in fields(cls):
            name = f"KERASDIST_{field.name.upper()}_TIMEOUT"
            text = environ.get(name)
            if text is None:
                continue
            try:
                given[field.name] = float(text)
                cls(**given)
            except ValueError as error:
                raise JobError(
                    f"Expected the variable {name} to be a positive number of seconds. "
                    f"Received: {name}={text!r}."
                ) from error
        return cls(**given)
