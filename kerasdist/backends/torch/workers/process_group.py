"""Collectives between the processes that hold replicas. In a job they use torch's process groups.

The replicas of one process are threads, and their values are combined first (`collectives.py`).
Then a `Group` combines the process's result with the results of the other processes.

Tensors are packed into as few messages as possible, because a message's latency costs more than
sending a few numbers. Tensors to be summed are packed by type; tensors to be copied are packed as
bytes.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent import futures
from datetime import timedelta
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Protocol, final

import torch
import torch.distributed as dist

from kerasdist import keras_compat
from kerasdist.api.options import CommunicationOptions
from kerasdist.backends.base import metering
from kerasdist.backends.base.checks import check_communication, check_shapes
from kerasdist.errors import JobError, ReplicaError
from kerasdist.job import listening

if TYPE_CHECKING:
    from kerasdist.cluster.source import Membership
    from kerasdist.job.job import Job

# The types in which gradients are sent, by the name of the compression.
_COMPRESSED = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}
# For types that Gloo or NCCL cannot sum: the type in which they are summed.
_SUMMED_AS = {
    torch.int16: torch.int32,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
# Newer versions of torch have another name for each of these functions.
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_sum: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# A message's header gives a type by its index in this list, which is the same on all workers.
_TYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)
# A header has room for this many dimensions, more than a tensor of a model has.
_MOST_AXES = 10


# Torch's default group, if `connect` made it.
_made: dist.ProcessGroup | None = None
# For each job whose script made torch's default group itself: the group that kerasdist uses.
_beside_default: weakref.WeakKeyDictionary[Job, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def connect(job: Job) -> None:
    """Creates a process group of all workers. All workers must call this function.

    The group becomes torch's default group. If the script has made the default group itself,
    kerasdist makes a second group, because the script's group may support only GPUs, and may be in
    use when kerasdist needs a group.
    """
    _take_part_of_cores(job.membership)
    _let_gloo_be_reached(job)
    _let_the_job_name_lost_workers()
    leave_models_alone()
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
        # torch's own socket would listen on all interfaces, and might find the port already taken.
        master_listen_fd=job.own_port().listening() if job.is_chief else None,
    )
    with listening.waiting_their_turn():
        dist.init_process_group(
            _backend(), store=store, rank=job.rank, world_size=job.num_workers, timeout=timeout
        )
    global _made
    _made = dist.group.WORLD
    # The group is destroyed when the job is left, while all workers still exist. At the exit of the
    # process the destruction could wait for a worker that has already ended.
    job.at_leave(dist.destroy_process_group)


def is_default_group_ours() -> bool:
    """Returns whether torch's default group is the job's, and not one that the script has made."""
    return dist.is_initialized() and dist.group.WORLD is _made


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _new_group(timeout: timedelta, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """Makes a group of the workers in `ranks`, or of all workers.

    All workers of the group must call this function, and no others.
    """
    with listening.waiting_their_turn():
        group: Any = dist.new_group(
            None if ranks is None else list(ranks),
            timeout=timeout,
            backend=_backend(),
            use_local_synchronization=ranks is not None,
        )
    return group


def _take_part_of_cores(membership: Membership) -> None:
    """Limits torch's threads to OMP_NUM_THREADS, even if this was set after torch's import.

    If the machine's workers together have one thread for each core, and no GPUs, each worker stays
    on its own cores. Otherwise the kernel moves workers between cores whenever they wait for each
    other, and the caches of the new core are cold.
    """
    said = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(said) if said.isdecimal() else 0
    if 0 < threads < torch.get_num_threads():
        torch.set_num_threads(threads)
    rank, workers = membership.local_rank, membership.local_workers
    if sys.platform == "linux" and not torch.cuda.is_available() and rank is not None and workers:
        cores = sorted(os.sched_getaffinity(0))
        if threads * workers == len(cores):
            os.sched_setaffinity(0, cores[threads * rank : threads * (rank + 1)])


def _let_gloo_be_reached(job: Job) -> None:
    """Makes Gloo listen on an interface that other workers can reach, unless the user chose one."""
    address = "127.0.0.1" if job.is_on_one_machine else listening.misleads(job.other_addresses)
    interface = None if address is None else listening.interface_of(address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _let_the_job_name_lost_workers() -> None:
    """Keeps NCCL from ending the process after an error, unless the user has set otherwise.

    By default NCCL's watchdog aborts the process (exit code 134), often before the job's monitor
    has reported which worker was lost. The monitor itself ends every process whose collectives wait
    for a lost worker, within a bounded time (exit code 75).
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


class Group:
    """The group of a single process: its collectives return the process's own tensors.

    In any group, all processes must make the same calls in the same order.

    Attributes:
        rank: This process's number.
        size: How many processes there are.
        is_first: In a group of one machine's workers, or of one row of a mesh: whether the job's
            chief is one of them. True in all other groups.
        gradients_travel_as: The name of the type in which gradients are sent; None for their own
            type.
    """

    rank = 0
    size = 1
    is_first = True
    gradients_travel_as: str | None = None

    def sums(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns each tensor summed over the processes."""
        return list(tensors)

    def from_chief(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the chief's tensors."""
        return list(tensors)

    def check_alike(self, label: str, tensors: Sequence[torch.Tensor]) -> None:
        """Refuses tensors that differ in shape or type between the processes."""

    def gather_alike(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the processes' tensors, stacked along a new axis 0."""
        return tensor[None]

    def gather(
        self, label: str, tensors: Sequence[torch.Tensor], axis: int
    ) -> list[tuple[torch.Tensor, int]]:
        """Concatenates each tensor over the processes, by rank.

        The sizes along the axis may differ. A scalar is not concatenated: the chief's is returned.
        With each tensor, also returns where this process's rows begin in it.
        """
        return [(tensor, 0) for tensor in tensors]

    def chiefs(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor on the chief, and zeros elsewhere; booleans become uint8.

        So a sum of the results over the workers is the chief's tensor.
        """
        bits = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
        return torch.zeros_like(bits) if self.rank else bits


class Waitable(Protocol):
    """A collective that was started, and that may still be running."""

    def wait(self) -> object:
        """Waits until the collective is done."""


def _wait_in_thread(work: Waitable) -> futures.Future[object]:
    """Waits for a collective of Gloo in a new thread.

    When the collective is done, Gloo frees the copy of the tensor that it has sent.
    """
    done: futures.Future[object] = futures.Future()

    def wait() -> None:
        try:
            done.set_result(work.wait())
        except BaseException as error:  # noqa: BLE001  the waiting step raises it again
            done.set_exception(error)

    threading.Thread(target=wait, daemon=True).start()
    return done


@final
class ReduceScatter:
    """A started reduce-scatter, which a sum over the machines may follow.

    The sum follows if several machines hold the same shards.

    Torch's work object keeps the sent tensor in memory. NCCL's object keeps the tensor until `wait`
    has made this thread's stream wait. Gloo's object keeps a copy until `wait` returns, and cannot
    tell beforehand whether `wait` would block. So on a CPU a new thread calls `wait`.
    """

    def __init__(
        self,
        work: Waitable,
        own: torch.Tensor,
        dtype: torch.dtype,
        between: Callable[[torch.Tensor], Waitable] | None,
    ) -> None:
        """Starts to wait for the collective `work`, which writes its result into `own`.

        `own` is this worker's part of the sum over one machine. `between` then starts the sum of
        this part over the machines; None if the first sum is the whole sum. `dtype` is the type of
        the result.
        """
        # What `wait` waits for first; None once it is done.
        self._first = work if own.is_cuda else _wait_in_thread(work)
        self._between = between
        self._last: Waitable | None = None
        self._own = own
        self._dtype = dtype

    def wait(self, seconds: float | None = None) -> bool:
        """Waits, on a CPU for `seconds` at most; returns whether the reduce-scatter is done.

        If it is done, the sent tensor is freed, and the sum over machines starts. These sums must
        start in the order of the buckets, because the order in which reduce-scatters are done may
        differ between workers.
        """
        if self._first is not None:
            if isinstance(self._first, futures.Future):
                futures.wait([self._first], seconds)
                if not self._first.done():
                    return False
                self._first.result()  # raises the work's own error, which may be a TimeoutError
            else:
                self._first.wait()
            self._first = None
            self._last = None if self._between is None else self._between(self._own)
        return True

    def part(self) -> torch.Tensor:
        """Waits for the sum; returns this worker's part of it."""
        self.wait()
        if self._last is not None:
            self._last.wait()
        return self._own.to(self._dtype)


@final
class ProcessGroup(Group):
    """The workers of a job, or some of these workers (`within_host`, `in_grid`).

    Attributes:
        device: The device on which this worker's tensors are sent and received.
        of_torch: The group to pass to torch's own functions; None means torch's default group.
        bytes_per_pack: The size of a bucket of gradients; None for the default.
        between: In a group of one machine's workers: the group of this worker and of those on other
            machines that hold the same shards. None in other groups.
    """

    def __init__(self, job: Job, device: torch.device, communication: CommunicationOptions) -> None:
        """Makes the group; `connect` must have been called before."""
        self.rank = job.rank
        self.size = job.num_workers
        self.device = device
        check_communication(communication, "PyTorch", ("bytes_per_pack", "compression"))
        self.bytes_per_pack = communication.bytes_per_pack
        self._compressed = _COMPRESSED[communication.compression]
        self.of_torch = _beside_default.get(job)
        self._ranks: range | None = None  # these workers' ranks in the job; None means all
        self.between: ProcessGroup | None = None
        self._timeout = timedelta(seconds=job.timeouts.meeting)
        self._name, self._collectives = "all workers", job.collectives
        if self._compressed is not None:
            self.gradients_travel_as = str(self._compressed).removeprefix("torch.")

    def within_host(self, workers: int) -> ProcessGroup:
        """Returns the group of this machine's workers.

        All workers of the job must call this method. Each machine has `workers` workers. After a
        reduce-scatter in this group, its result is summed over the machines.
        """
        inside, inside.between = self.in_grid(workers)
        return inside

    def in_grid(self, columns: int) -> tuple[ProcessGroup, ProcessGroup]:
        """Arranges the workers in rows; returns the groups of this worker's row and of its column.

        All workers of the job must call this method.
        """
        first, place = self.rank - self.rank % columns, self.rank % columns
        row = self._of_ranks(range(first, first + columns), "the workers of a row")
        column = self._of_ranks(range(place, self.size, columns), "the workers of equal shards")
        row.is_first = first == 0
        return row, column

    def _of_ranks(self, ranks: range, name: str) -> ProcessGroup:
        group = copy.copy(self)
        group._ranks, group._name = ranks, name
        group.rank, group.size = ranks.index(self.rank), len(ranks)
        group.of_torch = _new_group(self._timeout, ranks)
        return group

    def mesh(self) -> Any:
        """Returns a device mesh of torch for this group. `in_grid` must have made the group."""
        # imported here, because few programs need this module
        from torch.distributed.device_mesh import DeviceMesh

        assert self.of_torch is not None  # `in_grid` has set it
        return DeviceMesh.from_group(self.of_torch, self.device.type, mesh_dim_names=("model",))

    def _record(self, kind: str, sent: torch.Tensor) -> None:
        """Records that a collective starts, if the user has asked to record collectives."""
        if self._collectives is not None:
            dtype = str(sent.dtype).removeprefix("torch.")
            of = f"in the group of {self._name}"
            self._collectives.record(kind, f"{dtype}{list(sent.shape)} {of}")

    def start_sum(self, flat: torch.Tensor) -> Waitable:
        """Starts an in-place all-reduce of a contiguous tensor, compressed if the user chose so."""
        sent = self._compress(flat)
        self._record("all_reduce", sent)
        work: Any = dist.all_reduce(sent, group=self.of_torch, async_op=True)
        return work if sent is flat else work.get_future().then(lambda _: flat.copy_(sent))

    def start_sum_of_parts(self, flat: torch.Tensor) -> ReduceScatter:
        """Starts a reduce-scatter of a tensor of equal parts, compressed if the user chose so."""
        sent = self._compress(flat)
        own = sent.new_empty(len(flat) // self.size)
        self._record("reduce_scatter", sent)
        work = _scatter_sum(own, sent, group=self.of_torch, async_op=True)
        between = None if self.between is None else self.between.start_sum
        return ReduceScatter(work, own, flat.dtype, between)

    def _compress(self, flat: torch.Tensor) -> torch.Tensor:
        dtype = self._compressed
        return flat if dtype is None or flat.itemsize <= dtype.itemsize else flat.to(dtype)

    def start_gather_of_parts(self, part: torch.Tensor) -> tuple[Waitable, torch.Tensor]:
        """Starts an all-gather of parts of equal size.

        Returns its handle, and the tensor that has all parts after the gather.
        """
        whole = part.new_empty(self.size * len(part))
        self._record("all_gather", part)
        return _gather_into(whole, part, group=self.of_torch, async_op=True), whole

    @cached_property
    def of_buckets(self) -> ProcessGroup:
        """A second group of the same workers. It sums gradients while this group gathers weights.

        All workers must first read this property at the same point, because the first read makes
        the group.
        """
        beside = copy.copy(self)
        beside._name += ", for buckets"
        beside.of_torch = _new_group(self._timeout, self._ranks)
        if self.between is not None:
            beside.between = self.between.of_buckets
        return beside

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
            self._record("all_reduce", flat)
            with metering.waiting_for_workers():
                dist.all_reduce(flat, group=self.of_torch)
            chunks = flat.split([part.numel() for part in parts])
            for index, chunk in zip(members, chunks, strict=True):
                like = tensors[index]
                total = chunk.view(like.dtype) if like.is_complex() else chunk
                results[index] = total.view(like.shape).to(like.device, like.dtype)
        return results

    @torch.no_grad()
    def from_chief(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the chief's tensors, which the chief sends in one message."""
        if not tensors:
            return []
        parts = [bytes_of(tensor, self.device) for tensor in tensors]
        flat = self.broadcast(torch.cat(parts))
        return [
            _of_bytes(chunk, like.dtype, like.shape).to(like.device)
            for chunk, like in zip(flat.split([len(p) for p in parts]), tensors, strict=True)
        ]

    @torch.no_grad()
    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the chief's tensor. May overwrite `tensor`, the worker's own, with its values."""
        flat = bytes_of(tensor, self.device)
        self._record("broadcast", flat)
        with metering.waiting_for_workers():
            dist.broadcast(flat, group=self.of_torch, group_src=0)
        return flat.view(tensor.dtype).view(tensor.shape).to(tensor.device)

    @torch.no_grad()
    def gather_alike(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the workers' tensors, stacked along a new axis 0."""
        return self._gathered(tensor, self.device).to(tensor.device)

    def _gathered(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Sends this worker's tensor from a device; returns all workers' tensors, stacked."""
        every = self._gathered_bytes(bytes_of(tensor, device))
        return every.view(tensor.dtype).view(self.size, *tensor.shape)

    def _gathered_bytes(self, own: torch.Tensor) -> torch.Tensor:
        every = own.new_empty(self.size * len(own))
        if len(own):
            self._record("all_gather", own)
            with metering.waiting_for_workers():
                _gather_into(every, own, group=self.of_torch)
        return every

    @torch.no_grad()
    def gather(
        self, label: str, tensors: Sequence[torch.Tensor], axis: int
    ) -> list[tuple[torch.Tensor, int]]:
        """Concatenates the workers' values of each tensor by two messages: sizes, then all values.

        See `Group.gather`. For sending, each tensor is padded to the length that it has on the
        worker with the most rows.
        """
        sizes = self._exchange_sizes(label, tensors, axis)
        rows = [tensor.movedim(axis, 0) if tensor.ndim else tensor[None] for tensor in tensors]
        longest: list[int] = sizes.amax(0).tolist()
        parts = [bytes_of(padded(*one), self.device) for one in zip(rows, longest, strict=True)]
        every = self._gathered_bytes(torch.cat(parts))
        columns = every.view(self.size, -1).split([len(part) for part in parts], 1)
        found: list[tuple[torch.Tensor, int]] = []
        counts: list[list[int]] = sizes.T.tolist()
        for like, one, column, theirs in zip(tensors, rows, columns, counts, strict=True):
            shape = torch.Size((self.size, max(theirs), *one.shape[1:]))
            equal = _of_bytes(column, like.dtype, shape)
            whole = torch.cat([own[:count] for own, count in zip(equal, theirs, strict=True)])
            whole = whole.movedim(0, axis).contiguous() if like.ndim else whole[0]
            found.append((whole.to(like.device), sum(theirs[: self.rank])))
        return found

    def check_alike(self, label: str, tensors: Sequence[torch.Tensor]) -> None:
        """Refuses tensors that differ in shape or type between the workers."""
        self._exchange_sizes(label, tensors, None)

    def _exchange_sizes(
        self, label: str, tensors: Sequence[torch.Tensor], axis: int | None
    ) -> torch.Tensor:
        """Returns the sizes of the tensors along an axis, one row per worker.

        Refuses tensors that differ between the workers in their type, or in a size along any other
        axis.
        """
        own = torch.tensor([_header(tensor) for tensor in tensors], dtype=torch.int64)
        # Gloo sends the headers, also for tensors on GPUs, because the host needs the shapes.
        every = self._gathered(own, own.device)
        place = 2 + (axis or 0)
        alike = every.clone()
        if axis is not None:
            alike[:, :, place] = 0
        if not torch.equal(alike, alike[:1].expand_as(alike)):
            _refuse(label, every.tolist(), axis)
        return every[:, :, place]


def padded(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Returns rows, or flattened values, padded with zeros to a size along axis 0."""
    missing = size - len(rows)
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def _numbers(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    flat = tensor.detach().to(device).contiguous().view(-1)
    return flat.view(dtype) if flat.is_complex() else flat.to(dtype)


def bytes_of(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Returns the bytes of a tensor, contiguous in memory, on a device."""
    return tensor.detach().to(device).contiguous().view(-1).view(torch.uint8)


def _of_bytes(row: torch.Tensor, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    # The bytes are copied, because their address need not be a multiple of the type's size.
    whole = row.clone(memory_format=torch.contiguous_format)
    return whole.view(-1).view(dtype).view(shape)


def _refuse(label: str, every: Sequence[Sequence[list[int]]], axis: int | None) -> None:
    """Raises the error for tensors that differ; `every` has each worker's headers."""
    for theirs in zip(*every, strict=True):
        types = [_TYPES[header[0]] for header in theirs]
        if len(set(types)) > 1:
            raise ReplicaError(
                f"Expected every worker to bring tensors of one type to {label}. Received: "
                f"dtypes={types}, by worker. Cast them first."
            )
        check_shapes([header[2 : 2 + header[1]] for header in theirs], axis)


def _header(tensor: torch.Tensor) -> list[int]:
    shape = [*tensor.shape]
    beyond = [1] * (_MOST_AXES - len(shape))
    return [_TYPES.index(tensor.dtype), len(shape), *shape, *beyond]


# If torch has a default process group, as in a job, Keras 3.16 parallelizes by itself: it wraps
# every model in DistributedDataParallel, and sums every metric. The functions below are not called
# for a strategy's model. Any other model in a job's process belongs to its worker alone: if the
# chief evaluated it in a callback, Keras's sums would wait for the other workers forever. If the
# script itself has made the group, however, models outside of a strategy's scope use it as in plain
# Keras.


@cache
def leave_models_alone() -> None:
    """Keeps Keras from using a job's group for models outside of a strategy, once per process."""
    keras_compat.install(initialize_ddp=_initialize_ddp, alone_result=_result_of_process)


def _initialize_ddp(original: Callable[..., None], model: object) -> None:
    if not is_default_group_ours():
        original(model)


def _result_of_process(original: Callable[..., Any], model: object) -> Any:
    return keras_compat.metrics_here(model) if is_default_group_ours() else original(model)
