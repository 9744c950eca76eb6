"""The network of a job that the soak disturbs: hosts, and a machine at the end of a cable.

It is a namespace of this process's own, with a bridge that has the addresses of the hosts; `ssh`
leads to them (`tests.multiprocess.hosts`). The machine that joins the job has a namespace too, and
a pair of virtual devices from there to the bridge, which is the cable. Nothing of it is seen from
outside, and the kernel removes it with its last process.

Needs root, and Debian's iproute2.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.multiprocess.networks import ip, unshare

LAUNCHER, HOSTS, MACHINE = "10.77.0.1", ("10.77.0.2", "10.77.0.3"), "10.77.0.4"
PORT = 29400
SECRET = "of the soak"
_BRIDGE, _CABLE = "bridge0", "cable0"


def move_into_one() -> None:
    """Moves this process into a network of its own; there is no other thread yet."""
    unshare()
    ip("link", "set", "lo", "up")
    ip("link", "add", _BRIDGE, "type", "bridge")
    for address in (LAUNCHER, *HOSTS):
        ip("address", "add", f"{address}/24", "dev", _BRIDGE)
    ip("link", "set", _BRIDGE, "up")
    socket.sethostname(LAUNCHER)  # JAX sums at the address of a machine's name


class Machine:
    """A machine that joins the job by ``kerasdist join``, when it is told to.

    Args:
        folder: Where it writes what it says.
        variables: Its environment, beyond this process's.
    """

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        self._log = folder / "machine.log"
        own = {"KERASDIST_SECRET": SECRET, "ON": MACHINE}
        self._environment = {**os.environ, **variables, **own}
        begin = f"hostname {MACHINE} && echo && exec cat"  # until this process ends
        self._keeper = subprocess.Popen(
            ["unshare", "--net", "--uts", "sh", "-c", begin],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._keeper.stdout is not None
        self._keeper.stdout.readline()
        process = str(self._keeper.pid)
        self._enter = ("nsenter", "--target", process, "--net", "--uts")
        ip("link", "add", _CABLE, "type", "veth", "peer", "name", "eth0", "netns", process)
        ip("link", "set", _CABLE, "master", _BRIDGE, "up")
        for words in ("link set lo up", f"address add {MACHINE}/24 dev eth0", "link set eth0 up"):
            subprocess.run([*self._enter, "ip", *words.split()], check=True)
        self._joined: subprocess.Popen[bytes] | None = None

    @property
    def has_joined(self) -> bool:
        """Whether it takes part in the job, or tries to."""
        return self._joined is not None and self._joined.poll() is None

    def join(self) -> None:
        """Mends the cable, and joins the job."""
        ip("link", "set", _CABLE, "up")
        words = [sys.executable, "-m", "kerasdist", "join", f"{LAUNCHER}:{PORT}"]
        with self._log.open("ab") as log:
            self._joined = subprocess.Popen(
                [*self._enter, *words], env=self._environment, stdout=log, stderr=log
            )

    def cut(self) -> None:
        """Cuts its cable."""
        ip("link", "set", _CABLE, "down")

    def end(self, seconds: float) -> list[str]:
        """Removes it after the job's end; returns what should have ended with the job."""
        left = []
        if self._joined is not None:
            try:
                self._joined.wait(seconds)
            except subprocess.TimeoutExpired as error:
                left = [str(error)]
                self._joined.kill()
        self._keeper.communicate()
        return left
