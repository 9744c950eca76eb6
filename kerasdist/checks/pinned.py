"""Runs a command on its worker's part of the machine's cores.

    python -m kerasdist.checks.pinned CORES COMMAND...

One worker alone would compute on all cores, and two would share them: nothing would scale.
"""

from __future__ import annotations

import os
import sys

from kerasdist.cluster.kerasdist_variables import LOCAL_RANK


def main() -> None:
    """Replaces this process by the command."""
    size = int(sys.argv[1])
    first = int(os.environ[LOCAL_RANK]) * size
    cores = sorted(os.sched_getaffinity(0))[first : first + size]
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
