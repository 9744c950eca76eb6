"""Admits peers that prove that they belong to the job, and reports the others."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import final

from kerasdist.job import handshake, protocol
from kerasdist.job.handshake import RefusedError
from kerasdist.job.secret import Credentials

# How many connections may have proved nothing yet; for a new one the oldest is closed.
_MOST_STRANGERS = 64

_REPORTED_AT_ONCE = 5
_SECONDS_BETWEEN_REPORTS = 10.0


@final
class Gate:
    """Admits peers that know the secret of the job."""

    def __init__(self, credentials: Credentials, workers: int) -> None:
        self._credentials = credentials
        self._who = f"[worker 0/{workers}]"
        self._limit = max(_MOST_STRANGERS, 2 * workers)
        # Open connections that have not proved yet that they belong to the job, oldest first.
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._refused = 0
        self._unreported = 0
        self._reported_at = 0.0

    async def admits(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Returns whether the peer has proved that it is a worker of this job.

        Bounded in time, in the size of what is read, and in the number of peers at a time.
        """
        if len(self._strangers) >= self._limit:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[writer] = None
        try:
            async with asyncio.timeout(handshake.SECONDS):
                await self._check(reader, writer)
        except RefusedError as error:
            if error.peer_speaks:
                writer.write(protocol.packed({"type": "refused", "why": str(error)}))
            self._report(writer, str(error))
        except TimeoutError:
            self._report(writer, f"it proved nothing within {handshake.SECONDS:g} s")
        except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError):
            pass  # it has left by itself, as a worker does that tries again
        except (OSError, ValueError) as error:
            self._report(writer, str(error))
        else:
            return True
        finally:
            self._strangers.pop(writer, None)
        return False

    async def _check(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = handshake.challenge(self._credentials)
        writer.write(protocol.packed(asked))
        answered = await read(reader, handshake.MAX_BYTES)
        writer.write(protocol.packed(handshake.reply(asked, answered, self._credentials)))

    def _report(self, writer: asyncio.StreamWriter, why: str) -> None:
        """Prints which peer was refused; many refusals in few lines."""
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


async def read(reader: asyncio.StreamReader, most: int | None = None) -> object:
    """Returns the next message of a connection."""
    header = await reader.readexactly(protocol.HEADER_BYTES)
    size = protocol.body_size(header) if most is None else protocol.body_size(header, most)
    return protocol.unpacked(await reader.readexactly(size))


def _peer(writer: asyncio.StreamWriter) -> str:
    name = writer.get_extra_info("peername")
    return f"{name[0]}:{name[1]}" if name else "an unknown address"
