"""Hosts that are this machine's loopback addresses, and can be lost: an ``ssh`` that runs here.

As ssh does, it takes options with a value first, then the host, then words that a shell gets,
joined by spaces, and ends with 255 if it does not reach the host, or no longer.
"""

import os
import signal
import sys
from pathlib import Path

NAMES = ("127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5")

_SSH = f"""#!{sys.executable}
import os, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    if words[0] == "--":
        words = words[1:]
        break
    words = words[2:] if words[0] == "-o" else words[1:]
host, *command = words
down = os.path.join(os.path.dirname(__file__), "down-" + host)
with open(__file__ + ".log", "a") as log:
    log.write(" ".join(sys.argv) + "\\n")
if os.path.exists(down):
    print(f"ssh: connect to host {{host}} port 22: Connection refused", file=sys.stderr)
    sys.exit(255)
kept = {{name: os.environ[name] for name in KEPT or os.environ if name in os.environ}}
code = subprocess.call(["sh", "-c", " ".join(command)], env={{**kept, "ON": host}})
sys.exit(255 if os.path.exists(down) else 128 - code if code < 0 else code)
"""


def make(folder: Path, *kept: str) -> dict[str, str]:
    """Makes the ssh in a folder; returns the variables with which it is found.

    The hosts have all variables that ssh has, or those that are kept alone.
    """
    ssh = folder / "ssh"
    ssh.write_text(_SSH.replace("KEPT", repr(kept)), encoding="utf-8")
    ssh.chmod(0o755)
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": path}


def take_down(folder: Path, host: str) -> None:
    (folder / f"down-{host}").touch()


def bring_back(folder: Path) -> None:
    """Lets ssh reach all hosts again."""
    for path in folder.glob("down-*"):
        path.unlink(missing_ok=True)


def say_where(folder: Path) -> None:
    """Notes the supervisor of this worker, for `lose`."""
    (folder / f"worker-on-{os.environ['ON']}").write_text(str(os.getppid()), encoding="utf-8")


def lose(folder: Path, count: int) -> None:
    """Loses some of the hosts that there are: the kernel ends a worker with its supervisor.

    The first of them is that of rank 0, and this process's own the last to go.
    """
    there = sorted(path for path in folder.glob("worker-on-*"))
    hosts = [one.name.removeprefix("worker-on-") for one in there]
    up = [one for one in hosts if not (folder / f"down-{one}").exists()]
    own = os.environ["ON"]
    lost = sorted(up[:count], key=lambda host: host == own)
    for host in lost:
        take_down(folder, host)
    for host in lost:
        os.kill(int((folder / f"worker-on-{host}").read_text()), signal.SIGKILL)
