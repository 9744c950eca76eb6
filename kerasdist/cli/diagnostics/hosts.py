"""``kerasdist doctor`` for this machine, or for several hosts and the connections between them.

For several hosts, the command starts an agent on each host by ``python -m
kerasdist.cli.diagnostics.hosts``. The agent's first input line has environment variables as JSON,
and its first output line has its findings. The second input line lists the other hosts. The second
output line says which of these hosts the agent can reach.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TextIO, final

import typer

from kerasdist.cli.diagnostics import findings, info, machine
from kerasdist.cli.diagnostics.findings import Finding, judge
from kerasdist.cli.formatting import plain_console
from kerasdist.cli.launch import start
from kerasdist.cli.launch.placement import listening, place
from kerasdist.cli.options import AsJson, Hosts, listed
from kerasdist.job.listening import is_loopback

_SECONDS = 60.0
_SECONDS_TO_CONNECT = 5.0
_AT_ONCE = 32
_SHOWN = 8


class AgentError(Exception):
    """An agent cannot be started, or has ended too early."""


@final
class Agent:
    """A process that runs on a host and examines that host.

    Attributes:
        name: The host's name, by which the other hosts find it.
    """

    def __init__(self, host: str | None) -> None:
        """Starts the process on the host.

        Args:
            host: The name of the host; None for this machine.
        """
        self.name = socket.gethostname() if host is None else host.rpartition("@")[2]
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  stderr of the agent or ssh
        command = [sys.executable, "-P", "-m", "kerasdist.cli.diagnostics.hosts"]
        self._process = subprocess.Popen(
            command if host is None else start.by_ssh(host, command, os.environ.get("PYTHONPATH")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            start_new_session=True,  # so that Ctrl-C does not reach the agent
        )
        self.send({} if host is None else start.for_another_machine(os.environ))

    def send(self, line: object) -> None:
        """Sends a line to the agent.

        If the agent has ended, this method raises no error, but the next call of `answer` does.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()

    def answer(self) -> Any:
        """Waits for the agent's next answer, and returns it.

        Raises:
            AgentError: If there is no answer.
        """
        assert self._process.stdout is not None
        limit = threading.Timer(_SECONDS, self._process.kill)
        limit.start()
        line = self._process.stdout.readline()
        limit.cancel()
        if not line:
            raise AgentError(self._why())
        return json.loads(line)

    def close(self) -> None:
        """Ends the agent; on another host, the agent ends because its ssh process is ended here."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError), self._said, self._process:
            pass  # leaving the block closes the pipes; input that was not sent is dropped

    def _why(self) -> str:
        code = self._process.wait(5)
        if code == -signal.SIGKILL:
            return f"no answer within {_SECONDS:g} s"
        self._said.seek(0)
        lines = [line.strip() for line in self._said if line.strip()]
        return lines[-1] if lines else f"exit code {code}"


def look(hosts: Sequence[str]) -> list[Finding]:
    """Returns findings about each host, and about the connections between them.

    Raises:
        ClusterError: If the text of the hosts does not have the form of ``--hosts``.
        OSError: If ssh is not installed.
    """
    names = dict.fromkeys(slot.host for slot in place(None, hosts))
    found: list[Finding] = []
    there: dict[Agent, Any] = {}
    with contextlib.ExitStack() as stack:
        agents = [stack.enter_context(contextlib.closing(Agent(name))) for name in names]
        for agent in agents:
            try:
                there[agent] = agent.answer()
                found += findings.of_dicts(there[agent]["findings"], agent.name)
            except AgentError as error:
                said = (
                    f"No worker can be started there: `ssh {agent.name} true` must work without a "
                    "password, and the host needs the same interpreter and folder as this machine."
                )
                found.append(Finding("ssh", "problem", str(error), said, agent.name))
        if len(there) > 1:
            try:
                found += between(there)
            except AgentError as error:
                said = "The connection from this machine to a host was lost. Try again."
                found.append(Finding("ssh", "problem", str(error), said, "all hosts"))
    return found


def between(told: Mapping[Agent, Mapping[str, Any]]) -> list[Finding]:
    """Compares the versions of several hosts, and checks whether the hosts reach each other.

    Args:
        told: The first answer of each agent, by agent.

    Raises:
        AgentError: If an agent has ended.
    """
    known = [{"host": agent.name, **facts["listens"]} for agent, facts in told.items()]
    for agent in told:
        agent.send([each for each in known if each["host"] != agent.name])
    reached = [one for agent in told for one in agent.answer()]
    pairs = itertools.permutations([agent.name for agent in told], 2)
    return [
        of_versions({agent.name: facts["versions"] for agent, facts in told.items()}),
        *of_reached(dict(zip(pairs, reached, strict=True))),
    ]


def of_versions(facts: Mapping[str, Mapping[str, str]]) -> Finding:
    """Returns a finding that says whether all hosts have the same versions of all packages."""
    packages = sorted({name for versions in facts.values() for name in versions})
    differing = [
        f"{package}: "
        + ", ".join(
            f"{versions.get(package, 'none')} on {host}" for host, versions in facts.items()
        )
        for package in packages
        if len({versions.get(package) for versions in facts.values()}) > 1
    ]
    said = "Workers refuse to train together. Install the same versions." if differing else ""
    found = "; ".join(differing) or f"the same {len(packages)} on {len(facts)} hosts"
    return judge("versions", found, "Workers can train together.", problem=said, where="all hosts")


def of_reached(reached: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[Finding]:
    """Returns findings about which hosts know each other's names and can reach each other."""
    names: list[Finding] = []
    ports: list[Finding] = []
    for (here, there), each in reached.items():
        known, error, where = each["addresses"], each["error"], f"{here} to {there}"
        if not known:
            what = f"{there} is unknown on {here}: {error}"
            said = "Workers need this name. Add it to DNS or /etc/hosts, or give addresses."
            names.append(Finding("names", "problem", what, said, where))
        elif all(map(is_loopback, known)):
            said = f"Workers on {here} would look for {there} on {here}. Correct /etc/hosts."
            what = f"{there} is {known[0]} on {here}"
            names.append(Finding("names", "problem", what, said, where))
        elif error is not None:
            said = (
                f"A worker on {here} cannot connect to one on {there}. Open the ports from 20000 "
                "to 65535 between the hosts in the firewall or security group."
            )
            ports.append(Finding("ports", "problem", f"{there}: {error}", said, where))
    if not (names or ports):
        what = f"each of {len({here for here, _ in reached})} hosts reaches the others"
        ports.append(Finding("ports", "ok", what, "No firewall is between them.", "all hosts"))
    if not names:
        said = "Workers find each other by name."
        names.append(Finding("names", "ok", "each host knows the others", said, "all hosts"))
    return [*names[:_SHOWN], *ports[:_SHOWN]]


def main() -> None:
    """Runs an agent: reports what this host has, and then which hosts it can reach."""
    os.environ.update(json.loads(sys.stdin.readline() or "{}"))
    # What libraries print goes to stderr, because stdout is only for the agent's answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    serve(sys.stdin, answers)


def serve(others: TextIO, answers: TextIO) -> None:
    """Writes this host's findings, and then answers each line of `others`.

    Such a line lists other hosts. The answer says which of them this host can reach.
    """
    versions = info.gather().versions
    facts = {
        "findings": findings.as_dicts(machine.look()),
        "versions": {
            "Python": platform.python_version(),
            **{k: v for k, v in versions.items() if v},
        },
        "listens": _listen(),
    }
    answers.write(json.dumps(facts) + "\n")
    answers.flush()
    for line in others:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            answers.write(json.dumps(list(pool.map(_reached, json.loads(line)))) + "\n")
        answers.flush()


def _listen() -> dict[str, object]:
    """Starts a server that sends a random name to every client; returns its port and the name.

    The port is in the range that jobs use, so a client can test whether a firewall blocks that
    range. A client that receives another name has reached another machine.
    """
    server, name = listening(""), secrets.token_hex(8)
    threading.Thread(target=_greet, args=(server, name), daemon=True).start()
    return {"port": server.getsockname()[1], "name": name}


def _greet(server: socket.socket, name: str) -> None:
    while True:
        connection, _ = server.accept()
        with connection:
            connection.sendall(name.encode())


def _reached(target: Mapping[str, Any]) -> dict[str, object]:
    """Returns the addresses of another host, and an error if that host cannot be reached."""
    try:
        addresses = machine.resolved(target["host"])
    except OSError as error:
        return {"addresses": [], "error": f"{error}"}
    try:
        place = target["host"], target["port"]
        with socket.create_connection(place, _SECONDS_TO_CONNECT) as connection:
            connection.settimeout(_SECONDS_TO_CONNECT)
            said = connection.recv(64).decode(errors="replace")
    except OSError as error:
        return {"addresses": addresses, "error": f"{error}"}
    other = None if said == target["name"] else "another machine answers there"
    return {"addresses": addresses, "error": other}


def doctor(*, hosts: Hosts = None, as_json: AsJson = False) -> None:
    """Look for what would stop or slow a job on this machine, or on --hosts and between them.

    Shows versions, devices, links, ports, names, disks, shared memory and limits, and what each
    of them means for a job. The exit code is 1 if there is a problem; warnings leave it at 0.
    """
    found = look(listed(hosts)) if hosts else machine.look()
    if as_json:
        typer.echo(json.dumps(findings.as_dicts(found), indent=2))
    else:
        findings.show(hosts or "This machine", _shortened(found), plain_console())
    raise typer.Exit(findings.is_failed(found))


def _shortened(found: Sequence[Finding]) -> list[Finding]:
    """Joins a host's findings that are ``ok`` into one line, if there are more than three."""
    shown: list[Finding] = []
    for where in dict.fromkeys(one.where for one in found):
        here = [one for one in found if one.where == where]
        well = [one for one in here if one.verdict == "ok"]
        if where and len(well) > 3:
            here = [one for one in here if one not in well]
            names = ", ".join(one.check for one in well)
            shown.append(Finding(f"{len(well)} checks", "ok", names, "--json shows each.", where))
        shown += here
    return shown


if __name__ == "__main__":
    main()
