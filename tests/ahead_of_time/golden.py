"""What a step of `fit` sends and holds on 8, 64 and 4,096 GPUs, as text that a review shows.

    python -m tests.ahead_of_time.golden [--write]

It compiles the programs (a minute) and prints what differs from the files in `golden/`, or writes
these anew. Collectives are those that XLA has made, by kind, with the bytes of the whole array and
the devices that take part; then the bytes that each GPU holds of the state.
"""

import collections
import difflib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.ahead_of_time.processes import compiled

FOLDER = Path(__file__).with_suffix("")
TARGETS = {8: "8xh100", 64: "8x8xh100", 4096: "512x8xh100"}
MODELS = ("wide", "normalized")
SHARDINGS = ("replicated", "optimizer", "full")
NAMES = [f"{model}-{sharding}" for model in MODELS for sharding in SHARDINGS]
SECONDS = 900


def compiled_for(chosen: Mapping[int, Sequence[str]]) -> dict[int, dict[str, Any]]:
    """What has become of each program, by the number of devices and the name."""
    return {count: compiled(TARGETS[count], names, SECONDS) for count, names in chosen.items()}


def block(count: int, facts: Mapping[str, Any]) -> str:
    sent = collections.Counter(map(tuple, facts["sent"]))
    lines = [
        f"  {kind:<14} {times} x {size:>13,} bytes among {devices:,}"
        for (kind, size, devices), times in sorted(sent.items())
    ]
    held = [f"  holds {kind:<13} {size:>13,} bytes" for kind, size in facts["held"].items()]
    return "\n".join([f"{count:,} GPUs, each with 8 examples", *lines, *held]) + "\n"


def known(name: str) -> dict[int, str]:
    path = FOLDER / f"{name}.txt"
    blocks = path.read_text("utf-8").split("\n\n") if path.exists() else []
    return {int(one.split()[0].replace(",", "")): one.rstrip() + "\n" for one in blocks}


def main() -> None:
    found = compiled_for(dict.fromkeys(TARGETS, NAMES))
    for name in NAMES:
        path = FOLDER / f"{name}.txt"
        new = "\n".join(block(count, found[count][name]) for count in TARGETS)
        old = path.read_text("utf-8") if path.exists() else ""
        before, after = (text.splitlines(keepends=True) for text in (old, new))
        sys.stdout.writelines(difflib.unified_diff(before, after, path.name, path.name))
        if "--write" in sys.argv[1:]:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(new, "utf-8")


if __name__ == "__main__":
    main()
