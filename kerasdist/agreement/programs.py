"""The program that a worker is about to run, where all workers run one."""

from __future__ import annotations

import hashlib
import re
import zlib

from kerasdist.errors import DisagreementError
from kerasdist.job.comparison import described_difference
from kerasdist.job.job import Job

# Where a program calls Python, it holds the address of what it calls.
_NUMBER = re.compile(r"\d{6,}")

# How much of a line of a program is sent.
_LINE = 300


def require_equal(job: Job, program: str) -> None:
    """Makes sure that all workers run the same program. All workers must call it.

    Args:
        job: The job.
        program: The program's text, without the places where it was written.

    Raises:
        DisagreementError: If they do not; with the first line that differs.
    """
    lines = [_NUMBER.sub("", one) if "callback" in one else one for one in program.splitlines()]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(set(job.exchange("program of a step", digest))) == 1:
        return
    everyone = job.exchange("lines of the program", [zlib.crc32(one.encode()) for one in lines])
    shortest = min(map(len, everyone))
    first = next(
        (at for at in range(shortest) if len({theirs[at] for theirs in everyone}) > 1), shortest
    )
    own = lines[first].strip()[:_LINE] if first < len(lines) else "no further line"
    texts = job.exchange("a line of the program", own)
    said = described_difference([{f"line {first + 1} of the program": text} for text in texts])
    raise DisagreementError(
        f"[worker {job.rank}/{job.num_workers}] Expected all workers to run the same program. "
        f"Received: {said}. The model, its step, or the first batch is not the same on all of them."
    )
