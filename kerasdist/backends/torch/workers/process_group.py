"""Collectives between the processes that hold replicas; in a job by a process group of torch.

The replicas of one process are threads, whose values are combined first (`collectives.py`). The
process's group then combines the result with those of other processes.

Tensors are packed into as few messages as possible, since the latency of a message costs more than
a few numbers. Tensors to be summed are packed by type; tensors to be copied are packed as bytes.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, final

import torch
import torch.distributed as dist

from kerasdist.api.options import CommunicationOptions
from kerasdist.backends.base import metering
from kerasdist.backends.base.checks import check_shapes
from kerasdist.errors import JobError, ReplicaError
from kerasdist.job import listening

if TYPE_CHECKING:
    from kerasdist.job.job import Job

# The types in which gradients are sent, by the name of the compression.
_COMPRESSED = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}
# For types that Gloo or NCCL cannot sum: the type to sum them in.
_SUMMED_AS = {
    torch.int16: torch.int32,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
# Newer versions of torch have another name for it.
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_sum: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# A type's number in the header of a message is its index here. Workers have one version of torch.
_TYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)
# A header has room for this many dimensions, more than a model's tensor has.
_MOST_AXES = 10


# Torch's default group, if `connect` has made it.
_made: dist.ProcessGroup | None = None
# The groups of jobs whose script has made it.
_beside_default: weakref.WeakKeyDictionary[Job, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def connect(job: Job) -> None:
    """Creates a process group of all workers. All workers must call it.

    It is torch's default group, or one of our own beside the default group of the script, which
    may be for GPUs alone, and may be in use when we need ours.
    """
    _take_part_of_cores()
    _let_gloo_be_reached(job)
    _let_the_job_name_lost_workers()
    timeout = timedelta(seconds=job.timeouts.meeting)
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (job.rank, job.num_workers):
            raise JobError(
                f"Expected torch's process group to be that of the job: rank {job.rank} of "
                f"{job.num_workers}. Received: rank={dist.get_rank()}, "
                f"world_size={dist.get_world_size()}. Leave torch.distributed.init_process_group "
                "to kerasdist.MultiWorkerMirroredStrategy."
            )
        _beside_default[job] = _new_group(timeout)
        return
    host, _, port = job.chief_address.rpartition(":")
    store = dist.TCPStore(
        host.strip("[]"),
        int(port),
        job.num_workers,
        is_master=job.is_chief,
        timeout=timedelta(seconds=job.timeouts.join),
        wait_for_workers=False,
        # torch's own socket would listen on all interfaces, and could come too late for the port.
        master_listen_fd=job.own_port().listening() if job.is_chief else None,
    )
    with listening.waiting_their_turn():
        dist.init_process_group(
            _backend(),
            store=store,
            rank=job.rank,
            world_size=job.num_workers,
            timeout=timeout,
        )
    global _made
    _made = dist.group.WORLD
    # At leave all workers are still there. At the exit of the process this call could wait for a
    # worker that has ended.
    job.at_leave(dist.destroy_process_group)


def is_default_group_ours() -> bool:
    """Whether torch's default group is the job's: it is there, and not of the script's making."""
    return dist.is_initialized() and dist.group.WORLD is _made


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _new_group(timeout: timedelta) -> dist.ProcessGroup:
    with listening.waiting_their_turn():
        group: Any = dist.new_group(timeout=timeout, backend=_backend())
    return group


def _take_part_of_cores() -> None:
    """Limits torch's threads as the launcher says, even if torch was imported before."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and 0 < int(threads) < torch.get_num_threads():
        torch.set_num_threads(int(threads))


def _let_gloo_be_reached(job: Job) -> None:
    """Lets Gloo listen on the interface that other workers reach, unless the user has set one."""
    address = "127.0.0.1" if job.is_on_one_machine else listening.misleads(job.other_addresses)
    interface = None if address is None else listening.interface_of(address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _let_the_job_name_lost_workers() -> None:
    """Keeps NCCL from ending the process at an error, unless the user has set otherwise.

    By default its watchdog aborts the process (exit code 134), often before the job's monitor has
    said which worker was lost. The monitor ends every process whose collectives wait for that
    worker, in a bounded time (exit code 75).
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


class Group:
    """The group of a single process: its collectives return the process's own tensors.

    All processes of a group must make the same calls, in the same order.

    Attributes:
        rank: This process's number.
        size: How many processes there are.
        gradients_travel_as: The name of the type in which gradients are sent; None: their own.
    """

    rank = 0
    size = 1
    gradients_travel_as: str | None = None

    def sums(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns each tensor summed over the processes."""
        return list(tensors)

    def checked_sums(self, label: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns each tensor summed over the processes, after checking shapes and types."""
        del label
        return list(tensors)

    def from_chief(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the chief's tensors."""
        return list(tensors)

    def check_alike(self, label: str, tensors: Sequence[torch.Tensor]) -> None:
        """Refuses tensors that differ in shape or type between the processes."""
        del label, tensors

    def gather_alike(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the processes' tensors, stacked along a new axis 0."""
        return tensor[None]

    def gather(
        self, label: str, tensors: Sequence[torch.Tensor], axis: int
    ) -> list[list[torch.Tensor]]:
        """Returns each process's tensors, by rank; their sizes along the axis may differ."""
        del label, axis
        return [list(tensors)]

    def chiefs(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns, to be summed, the chief's tensor, and zeros on others; booleans become uint8."""
        bits = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
        return torch.zeros_like(bits) if self.rank else bits


class Waitable(Protocol):
    """A collective that has started."""

    def wait(self) -> object:
        """Waits until the collective is done."""


@final
class ReduceScatter:
    """A reduce-scatter that has started."""

    def __init__(self, work: Any, sent: torch.Tensor, own: torch.Tensor, dtype: torch.dtype):
        """Keeps what is sent until it is done."""
        self._work = work
        self._sent: torch.Tensor | None = sent
        self._own = own
        self._dtype = dtype

    @property
    def blocks(self) -> bool:
        """Whether `wait` would block this thread; on a GPU it never does."""
        return not (self._own.is_cuda or self._work.is_completed())

    def wait(self) -> None:
        """Waits until it is done, and frees what was sent."""
        if self._sent is not None:
            self._work.wait()
            self._sent = None

    def part(self) -> torch.Tensor:
        """Returns this worker's part of the sum, once it is done."""
        self.wait()
        return self._own.to(self._dtype)


@final
class ProcessGroup(Group):
    """The workers of a job.

    Attributes:
        device: The device on which this worker's tensors are sent and received.
        bytes_per_pack: The size of a bucket of gradients; None: the default.
    """

    def __init__(self, job: Job, device: torch.device, communication: CommunicationOptions) -> None:
        """Makes the group; the caller has called `connect`."""
        self.rank = job.rank
        self.size = job.num_workers
        self.device = device
        self.bytes_per_pack = communication.bytes_per_pack
        self._compressed = _COMPRESSED[communication.compression]
        self._group = _beside_default.get(job)  # None: torch's default group
        self._timeout = job.timeouts.meeting
        self._collectives = job.collectives
        if self._compressed is not None:
            self.gradients_travel_as = str(self._compressed).removeprefix("torch.")

    def _record(self, kind: str, sent: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        """Records a collective that starts, where the user has asked for it."""
        if self._collectives is not None:
            name = "all workers" if group is self._group else "buckets"
            dtype = str(sent.dtype).removeprefix("torch.")
            self._collectives.record(kind, f"{dtype}{list(sent.shape)} in the group of {name}")

    def start_sum(self, flat: torch.Tensor, group: dist.ProcessGroup | None = None) -> Waitable:
        """Starts an in-place all-reduce of a contiguous tensor, compressed if the user chose so."""
        group = group or self._group
        if self._compressed is None or flat.itemsize <= self._compressed.itemsize:
            self._record("all_reduce", flat, group)
            return _all_reduce(flat, group)
        small = flat.to(self._compressed)
        self._record("all_reduce", small, group)
        return _all_reduce(small, group).get_future().then(lambda _: flat.copy_(small))

    def start_sum_of_parts(
        self, flat: torch.Tensor, group: dist.ProcessGroup | None = None
    ) -> ReduceScatter:
        """Starts a reduce-scatter of a tensor of equal parts, compressed if the user chose so."""
        sent = flat
        if self._compressed is not None and flat.itemsize > self._compressed.itemsize:
            sent = flat.to(self._compressed)
        own = sent.new_empty(len(flat) // self.size)
        group = group or self._group
        self._record("reduce_scatter", sent, group)
        work = _scatter_sum(own, sent, group=group, async_op=True)
        return ReduceScatter(work, sent, own, flat.dtype)

    def start_gather_of_parts(self, part: torch.Tensor) -> tuple[Waitable, torch.Tensor]:
        """Starts an all-gather of equal parts; returns it, and the tensor that will hold all."""
        whole = part.new_empty(self.size * len(part))
        self._record("all_gather", part, self._group)
        return _gather_into(whole, part, group=self._group, async_op=True), whole

    @cached_property
    def of_buckets(self) -> dist.ProcessGroup:
        """A separate process group for sums of gradients beside the gathers of sharded weights.

        All workers must create it.
        """
        return _new_group(timedelta(seconds=self._timeout))

    @torch.no_grad()
    def sums(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns each tensor summed over the workers, in one message per type."""
        packs: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(tensors):
            packs.setdefault(_SUMMED_AS.get(tensor.dtype, tensor.dtype), []).append(index)
        results: list[torch.Tensor] = list(tensors)
        for dtype, members in packs.items():
            parts = [_numbers(tensors[index], dtype, self.device) for index in members]
            flat = torch.cat(parts) if len(parts) > 1 else parts[0].clone()
            self._record("all_reduce", flat, self._group)
            with metering.waiting_for_workers():
                dist.all_reduce(flat, group=self._group)
            chunks = flat.split([part.numel() for part in parts])
            for index, chunk in zip(members, chunks, strict=True):
                like = tensors[index]
                total = chunk.view(like.dtype) if like.is_complex() else chunk
                results[index] = total.view(like.shape).to(like.device, like.dtype)
        return results

    @torch.no_grad()
    def checked_sums(self, label: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns each tensor summed over the workers, after checking shapes and types."""
        self._shapes(label, tensors, None)
        return self.sums(tensors)

    @torch.no_grad()
    def from_chief(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the chief's tensors, in one message."""
        if not tensors:
            return []
        parts = [_bytes(tensor, self.device) for tensor in tensors]
        flat = torch.cat(parts)
        self._record("broadcast", flat, self._group)
        with metering.waiting_for_workers():
            dist.broadcast(flat, src=0, group=self._group)
        return [
            _of_bytes(chunk, like.dtype, like.shape).to(like.device)
            for chunk, like in zip(flat.split([len(p) for p in parts]), tensors, strict=True)
        ]

    @torch.no_grad()
    def gather_alike(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the workers' tensors, stacked along a new axis 0."""
        return self._gathered(tensor, self.device).to(tensor.device)

    def _gathered(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns the workers' tensors, stacked along a new axis 0, sent from a device."""
        own = _bytes(tensor, device)
        every = own.new_empty(self.size * len(own))
        self._record("all_gather", own, self._group)
        with metering.waiting_for_workers():
            _gather_into(every, own, group=self._group)
        return _of_bytes(every, tensor.dtype, torch.Size((self.size, *tensor.shape)))

    @torch.no_grad()
    def gather(
        self, label: str, tensors: Sequence[torch.Tensor], axis: int
    ) -> list[list[torch.Tensor]]:
        """Returns all workers' tensors, by rank, in two messages however many tensors there are."""
        shapes = self._shapes(label, tensors, axis)
        sizes = [
            [shape.numel() * t.element_size() for shape, t in zip(one, tensors, strict=True)]
            for one in shapes
        ]
        longest = max(map(sum, sizes))
        own = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        parts = [_bytes(tensor, self.device) for tensor in tensors]
        torch.cat(parts, out=own[: sum(map(len, parts))])
        every = own.new_empty(self.size * longest)
        if longest:
            self._record("all_gather", own, self._group)
            with metering.waiting_for_workers():
                _gather_into(every, own, group=self._group)
        return [
            [
                _of_bytes(chunk, like.dtype, shape).to(like.device)
                for chunk, shape, like in zip(
                    received[: sum(size)].split(size), shape_of, tensors, strict=True
                )
            ]
            for received, size, shape_of in zip(
                every.view(self.size, longest), sizes, shapes, strict=True
            )
        ]

    def check_alike(self, label: str, tensors: Sequence[torch.Tensor]) -> None:
        """Refuses tensors that differ in shape or type between the workers."""
        self._shapes(label, tensors, None)

    def _shapes(
        self, label: str, tensors: Sequence[torch.Tensor], axis: int | None
    ) -> list[list[torch.Size]]:
        """Returns the shapes of all workers' tensors, by rank, after checking that they agree."""
        rows = [_header(tensor) for tensor in tensors]
        own = torch.tensor(rows, dtype=torch.int64)
        # By Gloo, also where the tensors are on GPUs: the host reads the shapes at once.
        every: list[list[list[int]]] = self._gathered(own, own.device).tolist()
        self._check(label, tensors, every, axis)
        return [[torch.Size(row[2 : 2 + row[1]]) for row in one] for one in every]

    def _check(
        self,
        label: str,
        tensors: Sequence[torch.Tensor],
        every: Sequence[Sequence[list[int]]],
        axis: int | None,
    ) -> None:
        for number in range(len(tensors)):
            theirs = [one[number] for one in every]
            types = [_TYPES[row[0]] for row in theirs]
            if len(set(types)) > 1:
                raise ReplicaError(
                    f"Expected every worker to bring tensors of one type to {label}. Received: "
                    f"dtypes={types}, by worker. Cast them first."
                )
            check_shapes([row[2 : 2 + row[1]] for row in theirs], axis)


def _all_reduce(flat: torch.Tensor, group: dist.ProcessGroup | None) -> Any:
    return dist.all_reduce(flat, group=group, async_op=True)


def _numbers(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    flat = tensor.detach().to(device).reshape(-1)
    return flat.view(dtype) if flat.is_complex() else flat.to(dtype)


def _bytes(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.detach().to(device).reshape(-1).view(torch.uint8)


def _of_bytes(row: torch.Tensor, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    # A copy, as the bytes may not be aligned for the type.
    whole = torch.empty(shape.numel(), dtype=dtype, device=row.device)
    whole.view(torch.uint8).copy_(row)
    return whole.view(shape)


def _header(tensor: torch.Tensor) -> list[int]:
    shape = [*tensor.shape]
    return [_TYPES.index(tensor.dtype), len(shape), *shape, *[0] * (_MOST_AXES - len(shape))]
