"""Computes how many workers a job has, each worker's machine, and the coordinator's address."""

from __future__ import annotations

import random
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

from kerasdist.cli.launch.spec import GPU, JobSpec
from kerasdist.cluster import addresses
from kerasdist.cluster.kerasdist_variables import EACH_ITS_OWN, MIRRORED
from kerasdist.core import gpus
from kerasdist.core.backend_choice import WANT_PROCESS_A_DEVICE, backend_choice
from kerasdist.errors import ClusterError, DeviceError
from kerasdist.job.listening import BACKLOG, is_loopback

# A name must not begin with a dash, because ssh would take it for an option.
_ENTRY = re.compile(r"(?P<host>[^:\-][^:]*)(?::(?P<slots>\d+))?")
_TRIES = 100
_LOOPBACK = "127.0.0.1"


@final
@dataclass(frozen=True)
class Slot:
    """A place for one worker on a machine.

    Attributes:
        host: The name of the machine for ssh; None for this machine.
        rank: The worker's number.
        local_rank: The worker's number on the machine.
        local_workers: How many workers the machine has.
        share: The worker's part of the machine's GPUs and cores: the number of the part, and how
            many parts there are. None means part `local_rank` of `local_workers`. A share is
            given if slots of the machine may be left out: the other workers then keep their parts.
        machine: The name of a machine that has joined the running job (`kerasdist join`). Empty for
            a machine on which the launcher itself started workers.
        connection: The connection to a machine that has joined, by which the launcher starts the
            worker.
    """

    host: str | None
    rank: int
    local_rank: int
    local_workers: int
    share: tuple[int, int] | None = None
    machine: str = ""
    connection: socket.socket | None = None

    @property
    def own_share(self) -> tuple[int, int]:
        """The number of the worker's part of the GPUs and cores, and how many parts there are."""
        return self.share or (self.local_rank, self.local_workers)


def place(workers: int | Literal["gpu"] | None, hosts: Sequence[str] = ()) -> tuple[Slot, ...]:
    """Places workers on hosts, and fills the slots of each host before those of the next.

    If no host has a number of slots, the workers are divided equally among the hosts.

    Args:
        workers: The number of workers; None or ``"gpu"`` for one per slot. With
            ``"gpu"`` each host's number of slots must be given.
        hosts: The hosts; empty for this machine.
    """
    if isinstance(workers, int) and workers < 1:
        raise ClusterError(f"Expected one worker at least. Received: workers={workers}.")
    if not hosts:
        assert workers != GPU  # `counted` has already replaced "gpu" by a number
        count = workers or 1
        return tuple(Slot(None, rank, rank, count) for rank in range(count))
    listed = [_parsed(entry) for text in hosts for entry in addresses.expand(text, "hosts")]
    here = "localhost", _LOOPBACK, socket.gethostname()
    machines = [None if name in here else name for name, _ in listed]
    if len(set(machines)) < len(machines):
        raise ClusterError(
            f"Expected every host once, as host:slots. Received: hosts={list(hosts)}."
        )
    if workers == GPU:
        if any(slots is None for _, slots in listed):
            raise ClusterError(
                "Expected every host as host:slots, since the GPUs of other machines are not "
                f"counted. Received: workers='gpu', hosts={list(hosts)}. Write for example "
                f"{listed[0][0]}:8 for a host of eight GPUs."
            )
        workers = None
    if workers is not None and all(slots is None for _, slots in listed):
        share, rest = divmod(workers, len(listed))
        sizes = [share + (index < rest) for index in range(len(listed))]
    else:
        sizes = [1 if slots is None else slots for _, slots in listed]
        workers = sum(sizes) if workers is None else workers
        if workers > sum(sizes):
            raise ClusterError(
                f"Expected {workers} slots on the hosts. Received: hosts={list(hosts)}, with "
                f"{sum(sizes)}. Write host:slots, or ask for fewer workers."
            )
    slots: list[Slot] = []
    for host, size in zip(machines, sizes, strict=True):
        taken = min(size, workers - len(slots))
        slots += [Slot(host, len(slots) + local, local, taken) for local in range(taken)]
    return tuple(slots)


def listed(spec: JobSpec) -> tuple[Slot, ...]:
    """Returns the slots of a job's workers, except the slots of machines that may join later."""
    if spec.join_port is not None:
        return place(None if spec.hosts else spec.min_workers, spec.hosts)
    return place(spec.workers, spec.hosts)


def open_coordinator(slots: Sequence[Slot]) -> tuple[str, socket.socket | None]:
    """Chooses the coordinator's address, which is on the machine of rank 0.

    Returns ``host:port``, and the listening socket that the chief inherits. The socket is None if
    the chief is on another machine; then the port is drawn at random at every start.
    """
    host = host_of_chief(slots)
    if slots[0].host is not None:
        return addresses.join(host, addresses.of_job(_draw())), None
    opened = listening(host if host == _LOOPBACK else "")
    return addresses.join(host, opened.getsockname()[1]), opened


def host_of_chief(slots: Sequence[Slot]) -> str:
    """Returns the name by which workers find the chief's machine."""
    if slots[0].host is not None:
        return slots[0].host.rpartition("@")[2]
    if all(slot.host is None for slot in slots):
        return _LOOPBACK
    reached = [slot.connection.getsockname()[0] for slot in slots if slot.connection is not None]
    # On Kubernetes other pods cannot resolve the name of this pod. But the machines that joined
    # have connected to one of its addresses, so other machines can reach that address.
    return next((one for one in reached if not is_loopback(one)), socket.gethostname())


def free_port() -> int:
    """Returns a free port from 20000 to 32767, which another process may still take."""
    with listening("") as opened:
        return opened.getsockname()[1]


def listening(host: str) -> socket.socket:
    """Returns a socket that listens on a port outside of Linux's range for outgoing connections."""
    for _ in range(_TRIES):
        try:
            return socket.create_server((host, addresses.of_job(_draw())), backlog=BACKLOG)
        except OSError:
            continue
    raise ClusterError(
        f"Expected a free port from 20000 to 32767. Received: {_TRIES} that are in use. End jobs "
        "that were left behind."
    )


def _draw() -> int:
    # A script may seed Python's default generator. Then that generator would give the same port in
    # every run.
    return random.SystemRandom().randrange(1 << 16)


def _parsed(entry: str) -> tuple[str, int | None]:
    match = _ENTRY.fullmatch(entry)
    if match is None or match["slots"] == "0":
        raise ClusterError(
            "Expected hosts as host or host:slots, with one slot at least, and a name that does "
            f"not begin with a dash. Received: hosts={entry!r}."
        )
    return match["host"], None if match["slots"] is None else int(match["slots"])


def counted(spec: JobSpec) -> JobSpec:
    """Returns the job with `workers` as a number; a job with hosts is returned unchanged.

    By default there is one worker per GPU on PyTorch, and a single worker on other backends, where
    one process uses all GPUs.
    """
    if spec.hosts or isinstance(spec.workers, int):
        return spec
    count = len(gpus.visible(spec.variables))
    if spec.workers is None and backend_choice(spec.variables).name not in WANT_PROCESS_A_DEVICE:
        count = 1
    if count == 0 and spec.workers == GPU:
        raise DeviceError(
            "Expected a GPU on this machine, for a worker on each. Received: workers='gpu', "
            f"{gpus.CUDA}={spec.variables.get(gpus.CUDA)!r}, and no GPU that a process sees. Give "
            "the number of workers, for example 2."
        )
    return with_workers(spec, max(1, count))


def with_workers(spec: JobSpec, count: int) -> JobSpec:
    """Returns the job with `count` workers, which together may form one `MirroredStrategy`."""
    told = {MIRRORED: EACH_ITS_OWN} if count > 1 else {}
    return replace(spec, workers=count, environment={**told, **spec.environment})
