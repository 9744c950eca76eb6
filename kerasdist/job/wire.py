"""Messages between workers: JSON behind its length. Small facts only, never a tensor."""

from __future__ import annotations

import json
import socket
from typing import Any

# Of the protocol between workers; they must be equal.
VERSION = 2

HEADER_BYTES = 4

# A list of a large model's variables has a few hundred kilobytes.
MAX_BYTES = 64 * 1024 * 1024


def packed(message: Any) -> bytes:
    """Returns a message as it is sent.

    Args:
        message: What JSON can say.

    Raises:
        ValueError: If it is too large.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_BYTES:
        raise ValueError(
            f"Expected a message of at most {MAX_BYTES} bytes. Received: {len(body)} bytes. Send "
            "tensors by collectives."
        )
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def body_size(header: bytes, most: int = MAX_BYTES) -> int:
    """Returns the size of the body that a header announces.

    Args:
        header: Its bytes.
        most: The largest size to accept.

    Raises:
        ConnectionError: If it is larger: no worker sent it.
    """
    size = int.from_bytes(header, "big")
    if size > most:
        raise ConnectionError(f"not a kerasdist worker: it announces {size} bytes")
    return size


def unpacked(body: bytes) -> Any:
    """Returns the message of a body.

    Args:
        body: Its bytes.

    Raises:
        ConnectionError: If this is no message of ours.
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ConnectionError("not a kerasdist worker: its message is no JSON") from error


def receive(connection: socket.socket, most: int = MAX_BYTES) -> Any:
    """Waits for a message.

    Args:
        connection: A connected socket.
        most: The largest message to accept, in bytes.

    Raises:
        ConnectionError: If the other side has closed it.
        TimeoutError: If the socket's time-out passes.
    """
    return unpacked(_exactly(connection, body_size(_exactly(connection, HEADER_BYTES), most)))


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return bytes(data)
