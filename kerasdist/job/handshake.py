"""The secret of a job, and how a worker and the chief prove to each other that they know it.

The chief opens each connection with a challenge: the job's name and a random number. The worker
answers with a random number of its own, and with an HMAC-SHA256 of both numbers under the job's
secret. The chief replies with another HMAC of the same numbers. All other messages come after these
three. The secret itself is never sent, and an answer cannot be used on another connection.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import socket
import stat
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from kerasdist.errors import JobError
from kerasdist.job import protocol

SECRET = "KERASDIST_SECRET"
"""The environment variable with the secret itself. ``kerasdist run`` sets it for its workers."""

SECRET_FILE = "KERASDIST_SECRET_FILE"
"""The environment variable with the path of a file that holds the secret.

Only the file's owner may have access to the file (mode 600 or 400).
"""

JOB_ID = "KERASDIST_JOB_ID"
"""The environment variable with a name for the job.

A worker compares this name with the chief's name for its job. So the worker notices if the chief of
another job listens on the port.
"""

_READABLE_BY_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@final
@dataclass(frozen=True)
class Credentials:
    """The credentials by which workers of one job recognize each other.

    Attributes:
        secret: The job's secret; None if the job has none.
        job_id: The job's name; empty if the job has none.
    """

    secret: bytes | None = field(default=None, repr=False)
    job_id: str = ""


def credentials(environ: Mapping[str, str] = os.environ) -> Credentials:
    """Reads the job's secret and name from environment variables and the secret's file."""
    secret = environ.get(SECRET, "").strip().encode()
    path = environ.get(SECRET_FILE)
    if not secret and path:
        secret = _content(Path(path))
    return Credentials(secret or None, environ.get(JOB_ID, ""))


def _content(path: Path) -> bytes:
    wrong = (
        f"Expected {SECRET_FILE} to name a file that holds the job's secret, readable by its owner "
        f"alone. Received: {SECRET_FILE}={str(path)!r}"
    )
    try:
        mode = path.stat().st_mode
        secret = path.read_bytes().strip()
    except OSError as error:
        raise JobError(f"{wrong}: {error.strerror}.") from error
    if mode & _READABLE_BY_OTHERS:
        raise JobError(f"{wrong}, with mode {stat.S_IMODE(mode):o}. Run: chmod 600 {path}")
    if not secret:
        raise JobError(f"{wrong}, which is empty.")
    return secret


MAX_BYTES = 4096
"""The largest size of a message from a peer that has not yet proved that it belongs to the job."""

SECONDS = 10.0
"""How many seconds a peer has to prove that it belongs to the job."""

Message = dict[str, Any]
"""A message, which is sent as a JSON object."""

_NONCE_BYTES = 32
_CHIEF, _WORKER = "kerasdist chief", "kerasdist worker"


class RefusedError(Exception):
    """The chief refuses a peer that speaks kerasdist's protocol; the error's text says why."""


def challenge(mine: Credentials) -> Message:
    """Returns the chief's first message on a connection."""
    return {
        "type": "challenge",
        "protocol": protocol.VERSION,
        "job": mine.job_id,
        "secret": mine.secret is not None,
        "nonce": secrets.token_hex(_NONCE_BYTES),
    }


def answer(asked: object, mine: Credentials) -> Message:
    """Returns the worker's answer to a challenge."""
    asked = _checked(asked, "challenge", {"job": str, "secret": bool, "nonce": str})
    if asked.get("protocol") != protocol.VERSION:
        raise JobError(
            "Expected the same kerasdist on all workers. Received: protocol "
            f"{protocol.VERSION} here, {asked.get('protocol')!r} on the chief. Install one version."
        )
    if asked["job"] != mine.job_id:
        raise ConnectionError(f"the chief is of job {asked['job']!r}, not of job {mine.job_id!r}")
    if asked["secret"] != (mine.secret is not None):
        with_, without = ("chief", "worker") if asked["secret"] else ("worker", "chief")
        raise JobError(
            f"Expected the same {SECRET} on all workers. Received: one on this job's {with_}, none "
            f"on the {without}. Set {SECRET} (or {SECRET}_FILE) for every worker, or for none."
        )
    nonce = secrets.token_hex(_NONCE_BYTES)
    return {
        "type": "answer",
        "nonce": nonce,
        "digest": _digest(mine, _WORKER, asked["nonce"], nonce),
    }


def reply(asked: Message, answered: object, mine: Credentials) -> Message:
    """Returns the chief's reply to a worker's answer.

    Raises a RefusedError if the answer shows that the worker does not know the job's secret.
    """
    answered = _checked(answered, "answer", {"nonce": str, "digest": str})
    expected = _digest(mine, _WORKER, asked["nonce"], answered["nonce"])
    if not _equal(answered["digest"], expected):
        raise RefusedError(f"its {SECRET} is not the one of this job")
    return {"type": "proof", "digest": _digest(mine, _CHIEF, asked["nonce"], answered["nonce"])}


def check_proof(asked: Message, answered: Message, proof: object, mine: Credentials) -> None:
    """Raises an error unless `proof`, the chief's reply, shows that the chief knows the secret."""
    if isinstance(proof, dict) and proof.get("type") == "refused":
        raise JobError(f"the chief refused this worker: {proof.get('why')}")
    proof = _checked(proof, "proof", {"digest": str})
    if not _equal(proof["digest"], _digest(mine, _CHIEF, asked["nonce"], answered["nonce"])):
        raise ConnectionError("the peer at the chief's address does not know the job's secret")


def introduced(host: str, port: int, mine: Credentials, wait: float) -> socket.socket:
    """Returns a connection to the chief, after both have proved that they belong to the job."""
    connection = socket.create_connection((host, port), timeout=5)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The port of a starting chief may be open before the chief accepts connections. So the wait
        # for the chief's first message has a time-out of its own.
        connection.settimeout(wait)
        asked = protocol.receive(connection, MAX_BYTES)
        answered = answer(asked, mine)
        connection.sendall(protocol.packed(answered))
        check_proof(asked, answered, protocol.receive(connection, MAX_BYTES), mine)
    except BaseException:
        connection.close()
        raise
    return connection


def _digest(mine: Credentials, role: str, chiefs_nonce: str, workers_nonce: str) -> str:
    parts = (role, mine.job_id, chiefs_nonce, workers_nonce)
    # The length precedes each part, so that different parts never give the same bytes.
    # A peer may send any text as its nonce. Even half of a surrogate pair must raise no error here.
    encoded = [part.encode(errors="surrogatepass") for part in parts]
    message = b"".join(len(part).to_bytes(4, "big") + part for part in encoded)
    return hmac.new(mine.secret or b"", message, hashlib.sha256).hexdigest()


def _equal(received: str, expected: str) -> bool:
    return hmac.compare_digest(received.encode(errors="replace"), expected.encode())


def _checked(message: object, kind: str, fields: dict[str, type]) -> Message:
    """Returns the message, or raises an error if its type is not `kind` or if it lacks a field."""
    if not isinstance(message, dict) or message.get("type") != kind:
        raise ConnectionError("not a kerasdist worker: its first message is of another kind")
    for name, kind_of_value in fields.items():
        if not isinstance(message.get(name), kind_of_value):
            raise ConnectionError(f"not a kerasdist worker: its {kind} has no {name}")
    return message


# How many connections may be open to peers that have not yet proved that they belong to this job.
# If there are more, the oldest of these connections is closed. Large jobs have a higher limit.
_MOST_STRANGERS = 64

_REPORTED_AT_ONCE = 5
_SECONDS_BETWEEN_REPORTS = 10.0


@final
class Gate:
    """Admits only peers that know the secret of the job, and reports the peers that it refuses."""

    def __init__(self, credentials: Credentials, workers: int, who: str) -> None:
        self._credentials = credentials
        self._who = who
        self._limit = max(_MOST_STRANGERS, 2 * workers)
        # Open connections that have not proved that they belong to the job, the oldest first.
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._refused = 0
        self._unreported = 0
        self._reported_at = 0.0

    async def admits(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Returns whether the peer has proved that it is a worker of this job.

        There are limits on the time of the check, on the bytes that are read from the peer, and on
        the number of peers that are checked at the same time.
        """
        if len(self._strangers) >= self._limit:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[writer] = None
        try:
            async with asyncio.timeout(SECONDS):
                await self._check(reader, writer)
        except RefusedError as error:
            writer.write(protocol.packed({"type": "refused", "why": str(error)}))
            self._report(writer, str(error))
        except TimeoutError:
            self._report(writer, f"it proved nothing within {SECONDS:g} s")
        except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError):
            pass  # a worker that has waited too long closes its connection and tries again
        except (OSError, ValueError) as error:
            self._report(writer, str(error))
        else:
            return True
        finally:
            self._strangers.pop(writer, None)
        return False

    async def _check(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = challenge(self._credentials)
        writer.write(protocol.packed(asked))
        answered = await read(reader, MAX_BYTES)
        writer.write(protocol.packed(reply(asked, answered, self._credentials)))

    def _report(self, writer: asyncio.StreamWriter, why: str) -> None:
        """Prints which peer was refused.

        After the first few refusals, at most one line is printed every `_SECONDS_BETWEEN_REPORTS`.
        It also says how many other peers were refused since the last line.
        """
        self._refused += 1
        self._unreported += 1
        now = time.monotonic()
        at_once = self._refused <= _REPORTED_AT_ONCE
        if not at_once and now - self._reported_at < _SECONDS_BETWEEN_REPORTS:
            return
        more = f" ({self._unreported - 1} others since the last report)"
        sys.stderr.write(
            f"{self._who} refused a connection from {_peer(writer)}: {why}."
            f"{more if self._unreported > 1 else ''}\n"
        )
        self._unreported, self._reported_at = 0, now


async def read(reader: asyncio.StreamReader, most: int = protocol.FRAME_BYTES) -> object:
    """Returns the next message of a connection."""
    header = await reader.readexactly(protocol.HEADER_BYTES)
    return protocol.unpacked(await reader.readexactly(protocol.body_size(header, most)))


def _peer(writer: asyncio.StreamWriter) -> str:
    name = writer.get_extra_info("peername")
    return f"{name[0]}:{name[1]}" if name else "an unknown address"
