"""Lists of hosts as Slurm writes them: ``gpu[01-03,7],login``."""

from __future__ import annotations

import itertools
import re

from kerasdist.errors import ClusterError

_ENTRY = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")


def expand(text: str, name: str) -> list[str]:
    """Returns the hosts of a list, in its order.

    Numbers keep their leading zeros, and an entry may have several ranges:
    ``rack[0-1]n[08-10]`` is six hosts.
    """
    entries = _ENTRY.findall(text)
    if not entries or ",".join(entries) != text:
        raise _wrong(text, name)
    hosts: list[str] = []
    for entry in entries:
        parts = [
            _numbers(numbers, text, name) if plain == "" else [plain]
            for numbers, plain in _PART.findall(entry)
        ]
        hosts.extend("".join(chosen) for chosen in itertools.product(*parts))
    return hosts


def counts(text: str, name: str) -> list[int]:
    """Returns numbers by node from Slurm's short form: ``2(x3),1`` is 2, 2, 2, 1."""
    numbers: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        if match is None:
            raise ClusterError(
                f"Expected numbers by node, such as '2(x3),1', in {name}. "
                f"Received: {name}={text!r}."
            )
        numbers += [int(match[1])] * int(match[2] or 1)
    return numbers


def _numbers(ranges: str, text: str, name: str) -> list[str]:
    numbers: list[str] = []
    for each in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", each)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise _wrong(text, name)
        first, last = match[1], match[2] or match[1]
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


def _wrong(text: str, name: str) -> ClusterError:
    return ClusterError(
        f"Expected a list of hosts, such as 'a[01-03,7],b', in {name}. Received: {name}={text!r}."
    )
