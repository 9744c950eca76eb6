"""The hosts of ``kerasdist doctor``: an agent on each, and what they find of each other."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, final

from kerasdist.checks import findings
from kerasdist.checks.findings import Finding
from kerasdist.checks.machine import is_loopback
from kerasdist.launch import environment
from kerasdist.launch.commands import SSH
from kerasdist.launch.placement import place

_AGENT = ("-P", "-m", "kerasdist.checks.agent")
_SECONDS = 60.0
_TRIES = 5
_LARGEST_OFFSET = 0.5
_SHOWN = 8


class AgentError(Exception):
    """An agent cannot be started, or has ended."""


@final
class Agent:
    """A process on a host that answers questions.

    Attributes:
        name: The host, as ssh and the other hosts take it.
    """

    def __init__(self, host: str | None) -> None:
        """Starts the process.

        Args:
            host: The host; None: this machine.
        """
        self.name = socket.gethostname() if host is None else host.rpartition("@")[2]
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            _command(host),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process
        )
        self._last = ""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._threads = [
            threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._note, args=(self._process.stderr,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        with contextlib.suppress(OSError):  # the first question finds out why
            self._send({} if host is None else environment.for_another_machine(os.environ))

    def ask(self, do: str, **arguments: Any) -> None:
        """Sends a question.

        Raises:
            AgentError: If the agent has ended.
        """
        try:
            self._send({"do": do, **arguments})
        except OSError as error:
            raise AgentError(self._why()) from error

    def _send(self, line: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Returns the answer to the oldest question.

        Raises:
            AgentError: If there is none.
        """
        try:
            line = self._answers.get(timeout=_SECONDS)
        except queue.Empty as error:
            raise AgentError(f"no answer within {_SECONDS:g} s") from error
        if not line:
            raise AgentError(self._why())
        return json.loads(line)

    def close(self) -> None:
        """Ends the agent."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _why(self) -> str:
        code = self._process.wait(5)
        self._threads[1].join(2)
        return self._last or f"exit code {code}"

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            self._answers.put(line)
        self._answers.put("")

    def _note(self, lines: IO[str]) -> None:
        for line in lines:
            self._last = line.strip() or self._last


def _command(host: str | None) -> list[str]:
    if host is None:
        return [sys.executable, *_AGENT]
    path = os.environ.get("PYTHONPATH")
    words = [] if path is None else ["env", f"PYTHONPATH={path}"]
    words += [sys.executable, *_AGENT]
    return [*SSH, "--", host, f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(words)}"]


def look(hosts: Sequence[str]) -> list[Finding]:
    """Returns findings about each host, and about the connections between them.

    Raises:
        ClusterError: If the hosts are written wrongly.
        OSError: If there is no ssh.
    """
    names = dict.fromkeys(slot.host for slot in place(None, hosts))
    found: list[Finding] = []
    with _started(list(names)) as agents:
        there: list[Agent] = []
        for agent in agents:
            try:
                agent.ask("look")
                found += findings.of_dicts(agent.answer(), agent.name)
                there.append(agent)
            except AgentError as error:
                found.append(_unreachable(agent.name, str(error)))
        if len(there) > 1:
            try:
                found += between(there)
            except AgentError as error:
                said = "The connection between this machine and a host broke. Try again."
                found.append(Finding("ssh", "problem", str(error), said, "all hosts"))
    return found


@contextlib.contextmanager
def _started(hosts: Sequence[str | None]) -> Generator[list[Agent]]:
    with contextlib.ExitStack() as stack:
        agents: list[Agent] = []
        for host in hosts:
            agents.append(Agent(host))
            stack.callback(agents[-1].close)
        yield agents


def _unreachable(name: str, why: str) -> Finding:
    said = (
        f"No worker can be started there: `ssh {name} true` must work without a password, and "
        "the host needs the same interpreter and folder as this machine."
    )
    return Finding("ssh", "problem", why, said, name)


def between(agents: Sequence[Agent]) -> list[Finding]:
    """Compares versions, clocks, names and ports of several hosts; returns findings.

    Raises:
        AgentError: If an agent has ended.
    """
    facts = {agent.name: value for agent, value in zip(agents, _all(agents, "facts"), strict=True)}
    offsets = {agent.name: _offset(agent) for agent in agents}
    addresses = _all(agents, "listen")
    reached: dict[tuple[str, str], Mapping[str, Any]] = {}
    for agent in agents:
        others = [
            {"host": other.name, "port": address["port"], "name": address["name"]}
            for other, address in zip(agents, addresses, strict=True)
            if other is not agent
        ]
        agent.ask("reach", targets=others)
    for agent in agents:
        others = [other.name for other in agents if other is not agent]
        for other, answer in zip(others, agent.answer(), strict=True):
            reached[agent.name, other] = answer
    return [of_versions(facts), of_clocks(offsets), *of_reached(reached)]


def _all(agents: Sequence[Agent], question: str) -> list[Any]:
    for agent in agents:
        agent.ask(question)
    return [agent.answer() for agent in agents]


def _offset(agent: Agent) -> tuple[float, float]:
    """Returns how far a host's clock is ahead of this one's, and the largest possible error."""
    best = (0.0, float("inf"))
    for _ in range(_TRIES):
        before = time.time()
        agent.ask("time")
        there = agent.answer()
        after = time.time()
        best = min(best, (there - (before + after) / 2, (after - before) / 2), key=lambda x: x[1])
    return best


def of_versions(facts: Mapping[str, Mapping[str, str]]) -> Finding:
    """Returns the finding about the versions on the hosts."""
    packages = sorted({name for versions in facts.values() for name in versions})
    differing = [
        f"{package}: "
        + ", ".join(
            f"{versions.get(package, 'none')} on {host}" for host, versions in facts.items()
        )
        for package in packages
        if len({versions.get(package) for versions in facts.values()}) > 1
    ]
    if differing:
        said = "Workers refuse to train together. Install the same on all hosts."
        return Finding("versions", "problem", "; ".join(differing), said, "all hosts")
    found = f"the same {len(packages)} on {len(facts)} hosts"
    return Finding("versions", "ok", found, "Workers can train together.", "all hosts")


def of_clocks(offsets: Mapping[str, tuple[float, float]]) -> Finding:
    """Returns the finding about the clocks of the hosts, given their offsets and errors."""
    first, last = (
        min(offsets, key=lambda x: offsets[x][0]),
        max(offsets, key=lambda x: offsets[x][0]),
    )
    spread = offsets[last][0] - offsets[first][0]
    error = offsets[first][1] + offsets[last][1]
    found = f"{spread * 1e3:.1f} ms between {first} and {last}, within {error * 1e3:.1f} ms"
    if spread - error > _LARGEST_OFFSET:
        said = (
            "The times in logs, files and profiles of the hosts do not fit together. Start a time "
            "service on all: chrony or systemd-timesyncd."
        )
        return Finding("clocks", "warning", found, said, "all hosts")
    return Finding("clocks", "ok", found, "Times in logs and profiles fit.", "all hosts")


def of_reached(reached: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[Finding]:
    """Returns findings about which hosts know each other's names, and reach each other."""
    unknown = [pair for pair, each in reached.items() if not each["addresses"]]
    itself = [
        pair
        for pair, each in reached.items()
        if each["addresses"] and all(map(is_loopback, each["addresses"]))
    ]
    closed = [
        pair
        for pair, each in reached.items()
        if each["error"] is not None and pair not in (*unknown, *itself)
    ]
    found = [
        *(
            Finding(
                "names",
                "problem",
                f"{there} is unknown on {here}: {reached[here, there]['error']}",
                "Workers there do not find it. Add it to DNS or /etc/hosts, or name addresses.",
                f"{here} to {there}",
            )
            for here, there in unknown[:_SHOWN]
        ),
        *(
            Finding(
                "names",
                "problem",
                f"{there} is {reached[here, there]['addresses'][0]} on {here}",
                "Workers there would look for it on their own machine. Correct /etc/hosts.",
                f"{here} to {there}",
            )
            for here, there in itself[:_SHOWN]
        ),
    ]
    if not found:
        said = "Workers find each other by name."
        found.append(Finding("names", "ok", "each host knows the others", said, "all hosts"))
    for here, there in closed[:_SHOWN]:
        said = (
            f"A worker on {here} cannot connect to one on {there}. Open the ports from 20000 to "
            "65535 between the hosts in the firewall or security group."
        )
        why = f"{there}: {reached[here, there]['error']}"
        found.append(Finding("ports", "problem", why, said, f"{here} to {there}"))
    if not (unknown or itself or closed):
        text = f"each of {len({here for here, _ in reached})} hosts reaches the others"
        found.append(Finding("ports", "ok", text, "No firewall is between them.", "all hosts"))
    return found
