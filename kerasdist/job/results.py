"""What workers tell the command of kerasdist that has started them, by lines of their output.

The command reads them without Keras, so nothing of it is imported here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

BENCH = "KERASDIST_BENCH"
"""Set in the workers of a benchmark."""

_MARK = "kerasdist-result: "


def is_benchmark() -> bool:
    """Returns whether this process is a worker of a benchmark."""
    return bool(os.environ.get(BENCH))


def tell(result: Any) -> None:
    """Prints a result for the command that has started this worker."""
    sys.stdout.write(f"\n{_MARK}{json.dumps(result)}\n")
    sys.stdout.flush()


def told(lines: Iterable[str]) -> list[Any]:
    """Returns the results among the lines of a worker's output."""
    return [json.loads(line.removeprefix(_MARK)) for line in lines if line.startswith(_MARK)]


@final
@dataclass(frozen=True)
class AllReduce:
    """A sum of one array over all replicas.

    Attributes:
        bytes: Its size.
        seconds: How long a sum takes; the median of several.
        replicas: How many replicas there are.
    """

    bytes: int
    seconds: float
    replicas: int

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second that each device sends, as NCCL's tests count them.

        In the best all-reduce each device sends ``2 (n - 1) / n`` of the array.
        """
        return 2 * (self.replicas - 1) / self.replicas * self.bytes / self.seconds
