"""Messages between workers: JSON behind its length. Small facts only, never a tensor."""

from __future__ import annotations

import base64
import json
import socket
import zlib
from typing import Any

# Of the protocol between workers; they must be equal.
VERSION = 4

HEADER_BYTES = 4

MAX_BYTES = 64 * 1024 * 1024
"""The most that workers may exchange at once: a large model's variables are a few 100 KB."""

# What an exchange gives: the values of all; the same, but to the chief alone; or a number for each
# value, which says who sent the same.
ALL, FOR_CHIEF, NUMBERS = "all", "for chief", "numbers"

# The channel of the answers to workers that wait for a file of the chief.
SAVES = "saves"

# What else is in the largest message: some bytes for each worker.
_FRAME_BYTES = MAX_BYTES + 1024 * 1024


class MalformedError(ConnectionError):
    """A message is not of the form that workers send."""


def packed(message: object) -> bytes:
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


def compressed(value: object) -> str:
    """Returns a value as text, compressed: for what is long, and goes to all workers."""
    return base64.b85encode(zlib.compress(json.dumps(value).encode())).decode()


def decompressed(text: str) -> Any:
    """Returns the value of a `compressed` text."""
    return json.loads(zlib.decompress(base64.b85decode(text)))


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
