"""The compiled program of a step, which must be equal on all workers."""

from __future__ import annotations

import hashlib
import re
import zlib

from kerasdist.errors import DisagreementError
from kerasdist.job.comparison import described_difference
from kerasdist.job.job import Job

# A program that calls Python holds the address of the function.
_NUMBER = re.compile(r"\d{6,}")

# How many characters of a line of a program are sent.
_LINE = 300


def digest_of(program: str) -> str:
    """Returns a digest of a program that is equal on workers which run the same."""
    return hashlib.sha256("\n".join(_lines(program)).encode()).hexdigest()


def _lines(program: str) -> list[str]:
    return [_NUMBER.sub("", one) if "callback" in one else one for one in program.splitlines()]


def require_equal(job: Job, program: str) -> None:
    """Raises DisagreementError if workers run different programs. All workers must call it."""
    lines, digest = _lines(program), digest_of(program)
    if job.all_have_one("program of a step", digest):
        return
    everyone = job.all_gather_object(
        "lines of the program", [zlib.crc32(one.encode()) for one in lines]
    )
    shortest = min(map(len, everyone))
    first = next(
        (at for at in range(shortest) if len({theirs[at] for theirs in everyone}) > 1), shortest
    )
    own = lines[first].strip()[:_LINE] if first < len(lines) else "no further line"
    texts = job.all_gather_object("a line of the program", own)
    said = described_difference([{f"line {first + 1} of the program": text} for text in texts])
    raise DisagreementError(
        f"[worker {job.rank}/{job.num_workers}] Expected all workers to run the same program. "
        f"Received: {said}. The model, its step, or the first batch is not the same on all of them."
    )
