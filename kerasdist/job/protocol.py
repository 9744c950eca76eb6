"""The format of messages between workers: the length of a JSON text, and then the text.

Messages contain small facts, never tensors. This file also says how long workers wait for each
other.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, final

from kerasdist.errors import JobError

# The version of the protocol, which must be equal on all workers.
VERSION = 4

HEADER_BYTES = 4

MAX_BYTES = 64 * 1024 * 1024
"""The most bytes that all values in one exchange may have together; equal values count once.

The facts about a large model take a few hundred KB.
"""

# What workers get from an exchange. `ALL`: all workers get all values. `FOR_CHIEF`: only the chief
# gets the values. `NUMBERS`: in place of the values, all workers get numbers that are equal for
# equal values.
ALL, FOR_CHIEF, NUMBERS = "all", "for chief", "numbers"

# The channel on which the coordinator answers workers that ask whether the chief has written a
# file, such as a saved model.
SAVES = "saves"

# The size of the largest message: `MAX_BYTES` for the values, and 1 MiB for the rest, such as the
# numbers that say which workers sent which value.
FRAME_BYTES = MAX_BYTES + 1024 * 1024


Facts = Mapping[str, object]
"""What workers tell each other: names and values that can be written as JSON."""


class MalformedError(ConnectionError):
    """Raised for a message that does not have the form of kerasdist's messages."""


def packed(message: object) -> bytes:
    """Returns the bytes of a message: its length, and its JSON."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > FRAME_BYTES:
        raise ValueError(
            f"Expected a message of at most {FRAME_BYTES} bytes. Received: {len(body)} bytes. "
            "Send tensors by collectives."
        )
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def body_size(header: bytes, most: int) -> int:
    """Returns the size of the body that a header announces; refuses more than `most` bytes."""
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


def compressed(value: object) -> str:
    """Returns a value as compressed text, the form in which long values go to all workers."""
    return base64.b85encode(zlib.compress(json.dumps(value).encode())).decode()


def decompressed(text: str) -> Any:
    """Returns the value from a text that `compressed` returned."""
    return json.loads(zlib.decompress(base64.b85decode(text)))


def receive(connection: socket.socket, most: int = FRAME_BYTES) -> Any:
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


@final
@dataclass(frozen=True)
class Timeouts:
    """How long a worker waits before it ends the job with an error, in seconds.

    Attributes:
        join: The time in which all workers must join at the start.
        heartbeat: The longest time for which a worker, or the chief, may send no message.
        meeting: The longest wait for the other workers at a point that all must reach: an exchange,
            the next step, or the end of the script. A framework's collectives have the same limit.
    """

    join: float = 300.0
    heartbeat: float = 60.0
    meeting: float = 600.0

    @property
    def beat(self) -> float:
        """Seconds from one heartbeat to the next."""
        return min(1.0, self.heartbeat / 4)

    @classmethod
    def of_environment(cls, environ: Mapping[str, str] = os.environ) -> Timeouts:
        """Reads the time-outs from environment variables; uses defaults for variables not set.

        The variables are ``KERASDIST_JOIN_TIMEOUT``, ``KERASDIST_HEARTBEAT_TIMEOUT`` and
        ``KERASDIST_MEETING_TIMEOUT``.
        """
        given: dict[str, float] = {}
        for field in fields(cls):
            name = f"KERASDIST_{field.name.upper()}_TIMEOUT"
            text = environ.get(name)
            if text is None:
                continue
            try:
                seconds = float(text)
            except ValueError:
                seconds = 0.0
            if not seconds > 0:
                raise JobError(
                    f"Expected the variable {name} to be a positive number of seconds. "
                    f"Received: {name}={text!r}."
                )
            given[field.name] = seconds
        return cls(**given)
