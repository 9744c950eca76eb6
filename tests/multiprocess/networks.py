"""Two workers in networks of their own, with a cable between them that can be cut.

Each worker moves itself into a new namespace, with a new name. The chief lays the cable, a pair of
virtual devices, into the other's by that one's process number. Nothing has a name that another
process sees, and the kernel removes namespace and cable with their last process, however that ends.

Needs root, and Debian's iproute2.
"""

import ctypes
import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

# os.unshare comes with Python 3.12.
CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000
PATIENCE = 60.0

CHIEF = "10.77.0.1"


def unshare():
    """Moves this process into a network of its own, in which it may have another name."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET | CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "cannot make a network namespace; it takes root")


def move_into_one(rank: int, named: bool):
    """Moves worker 0 or 1 of a job of two into its network; FOLDER is a folder of the job's.

    The machine's name there leads to its address, or, if it is not named, to the loopback.
    """
    unshare()
    note = Path(os.environ["FOLDER"]) / "moved"
    if rank == 0:
        _wait("worker 1", note.exists)
        other = note.read_text("utf-8")
        ip("link", "add", "cable0", "type", "veth", "peer", "name", "cable1", "netns", other)
    else:
        unfinished = note.with_suffix(".unfinished")
        unfinished.write_text(str(os.getpid()), "utf-8")
        unfinished.rename(note)
        _wait("the cable", lambda: "cable1" in Path("/proc/self/net/dev").read_text("utf-8"))
    ip("address", "add", f"10.77.0.{rank + 1}/24", "dev", f"cable{rank}")
    ip("link", "set", "lo", "up")
    ip("link", "set", f"cable{rank}", "up")
    socket.sethostname(f"10.77.0.{rank + 1}" if named else "localhost")


def cut():
    """Cuts the cable, at worker 1's end."""
    ip("link", "set", "cable1", "down")


def ip(*words: str):
    try:
        subprocess.run(["ip", *words], check=True)
    except FileNotFoundError as error:
        message = "Expected the command `ip`. Install it: apt-get install iproute2"
        raise RuntimeError(message) from error


def _wait(what: str, is_there: Callable[[], bool]):
    end = time.monotonic() + PATIENCE
    while not is_there():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {PATIENCE:g} s for {what}")
        time.sleep(0.02)
