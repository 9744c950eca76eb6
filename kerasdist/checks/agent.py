"""Answers the questions of ``kerasdist doctor`` on one of several hosts.

    python -m kerasdist.checks.agent

The first line of the standard input has variables for the environment, as JSON. Each other one is
a question, a line of the standard output its answer. It ends with its input.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TextIO

from kerasdist.checks import machine
from kerasdist.checks.findings import as_dicts
from kerasdist.launch import info
from kerasdist.launch.placement import listening

_SECONDS = 5.0
_AT_ONCE = 32


def main() -> None:
    """Answers questions until the input ends."""
    os.environ.update(json.loads(sys.stdin.readline() or "{}"))
    # Keeps what libraries print apart from the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    serve(sys.stdin, answers)


def serve(questions: TextIO, answers: TextIO) -> None:
    """Answers the questions of a stream."""
    name = secrets.token_hex(8)
    known: dict[str, Callable[..., Any]] = {
        "look": lambda: as_dicts(machine.look()),
        "facts": _facts,
        "time": time.time,
        "listen": lambda: _listen(name),
        "reach": _reach,
    }
    for line in questions:
        question = json.loads(line)
        answer = known[question.pop("do")](**question)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _facts() -> dict[str, Any]:
    """Returns what must be equal on all hosts."""
    versions = info.gather().versions
    return {"Python": platform.python_version(), **{k: v for k, v in versions.items() if v}}


def _listen(name: str) -> dict[str, Any]:
    """Listens on a port that jobs use, and sends this agent's name to whatever connects."""
    server = listening("")
    threading.Thread(target=_greet, args=(server, name), daemon=True).start()
    return {"port": server.getsockname()[1], "name": name, "host": socket.gethostname()}


def _greet(server: socket.socket, name: str) -> None:
    while True:
        connection, _ = server.accept()
        with connection:
            connection.sendall(name.encode())


def _reach(targets: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns, for each target, its addresses and what keeps this host from it, if anything."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(_reached, targets))


def _reached(target: Mapping[str, Any]) -> dict[str, Any]:
    try:
        addresses = machine.resolved(target["host"])
    except OSError as error:
        return {"addresses": [], "error": f"{error}"}
    try:
        with socket.create_connection((target["host"], target["port"]), _SECONDS) as connection:
            connection.settimeout(_SECONDS)
            said = connection.recv(64).decode(errors="replace")
    except OSError as error:
        return {"addresses": addresses, "error": f"{error}"}
    other = None if said == target["name"] else "another machine answers there"
    return {"addresses": addresses, "error": other}


if __name__ == "__main__":
    main()
