"""Runs `two_processes.py` with each tool: the table of docs/guides/keras-on-torch.md.

    python -m tests.versions.comparison [case ...]

Keras's own column needs Keras 3.16, which is not released: all run with the nightly of
requirements/keras-nightly.txt.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.environment import QUIET, WORKERS, of_users, values
from tests.fresh import ROOT
from tests.versions import nightly

SCRIPT = Path(__file__).with_name("two_processes.py")
TOOLS = ("alone", "keras", "kerasdist")
CASES = (
    *("even", "ragged", "uneven", "own_step", "batch_norm"),
    *("metric", "predict", "arrays", "batch_size", "killed", "speed"),
)
# What ends by itself does so in a quarter of this.
SECONDS = 60.0


def run(tool: str, case: str) -> str:
    """What the processes found, or how they ended."""
    started = [sys.executable]
    if tool != "alone":
        started += ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    path = os.pathsep.join([str(nightly.install(nightly.pinned()).folder), str(ROOT)])
    environment = {**of_users(), **values((*QUIET, *WORKERS)), "PYTHONPATH": path}
    began = time.monotonic()
    with subprocess.Popen(
        [*started, str(SCRIPT), tool, case],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, errors = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return f"no end after {SECONDS:.0f} s"
    if process.returncode:
        print(f"--- {tool} {case}: {errors[-6000:]}", file=sys.stderr)
        return f"exit status {process.returncode} after {time.monotonic() - began:.0f} s"
    # Lines of two processes can stand behind each other.
    lines = map(json.loads, re.findall(r'\{"rank".*?\}', said))
    found = [one["found"] for one in sorted(lines, key=lambda one: one["rank"])]
    if all(one == found[0] for one in found):
        return str(found[0])
    return "; ".join(f"{one} on process {rank}" for rank, one in enumerate(found))


def main():
    for case in sys.argv[1:] or CASES:
        for tool in TOOLS:
            print(f"{case:10} {tool:10} {run(tool, case)}", flush=True)


if __name__ == "__main__":
    main()
