"""Buckets of gradients, each summed over the workers by one collective."""

from __future__ import annotations

import operator
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, final

import keras
import torch
import torch.distributed as dist

from kerasdist import keras_compat
from kerasdist.agreement.results import unnumbered
from kerasdist.backends.base import metering
from kerasdist.backends.torch.fit.gradients import Gradients
from kerasdist.backends.torch.state import sharded_optimizers
from kerasdist.backends.torch.state.shards import Shard, shard_of
from kerasdist.backends.torch.workers.process_group import padded

if TYPE_CHECKING:
    from kerasdist.backends.torch.workers.process_group import ProcessGroup, ReduceScatter, Waitable
    from kerasdist.job.job import Job

# DistributedDataParallel's default size: so large that the latency of a message hardly counts.
_BUCKET_BYTES = 25 * 2**20
# For how many seconds a step waits for earlier sums before it sends further full gradients.
_PATIENCE = 20.0
# For how many seconds a step on a CPU polls for a sum before it sleeps until the sum is there. A
# thread that has slept computes slowly at first: its CPU has gone to sleep, too.
_POLLING = 1e-3


@final
class Bucket:
    """Gradients of one type, which one all-reduce sums.

    The last bucket also has room for metrics, and for flags that say which gradients a worker has.
    """

    def __init__(self, like: Sequence[torch.Tensor], room: int, group: ProcessGroup) -> None:
        """Makes a bucket for gradients with the shapes of `like`, and for `room` other numbers."""
        self._group = group
        sizes = [one.numel() for one in like]
        first = like[0].detach() if like else torch.empty((), device=group.device)
        self.numbers = first.new_zeros(sum(sizes) + room)
        *chunks, self.room = self.numbers.split([*sizes, room])
        self.gradients = [chunk.view(one.shape) for chunk, one in zip(chunks, like, strict=True)]
        self.clear()

    def clear(self) -> None:
        """Empties the bucket."""
        self.missing = len(self.gradients)
        self.work: Waitable | None = None

    def put(self, place: int, gradient: torch.Tensor | None, weight: float) -> None:
        """Stores a gradient, multiplied by `weight`, in the bucket."""
        if gradient is None:
            self.gradients[place].zero_()
        else:
            torch.mul(gradient, weight, out=self.gradients[place])
        self.missing -= 1

    def start(self) -> None:
        """Starts the sum over the workers."""
        self.work = self._group.start_sum(self.numbers)

    def wait(self) -> None:
        """Waits until the sum over the workers is done."""
        assert self.work is not None
        with metering.waiting_for_workers():
            if not self.numbers.is_cuda and isinstance(self.work, dist.Work):
                end = time.perf_counter() + _POLLING
                while not self.work.is_completed() and time.perf_counter() < end:
                    os.sched_yield()
            self.work.wait()
        self.work = None  # frees the compressed copy that torch's work object may hold

    def total(self, place: int) -> torch.Tensor:
        """Returns one gradient's sum over the workers."""
        return self.gradients[place]


@final
class ShardedBucket:
    """Gradients of sharded weights, sent in one message. A worker gets its shards of the sums."""

    def __init__(
        self, like: Sequence[torch.Tensor], shards: Sequence[Shard], group: ProcessGroup
    ) -> None:
        """Makes a bucket for the gradients of sharded weights; `like` gives the gradients' type."""
        self._group = group
        self._like = like[0].detach()
        self._shards = shards
        self._lengths = [shard.length for shard in shards]
        self.clear()

    def clear(self) -> None:
        """Empties the bucket."""
        self.missing = len(self._shards)
        self._numbers: torch.Tensor | None = None  # one row for each worker
        self._sum: ReduceScatter | None = None
        self._parts: Sequence[torch.Tensor] = ()

    def put(self, place: int, gradient: torch.Tensor | None, weight: float) -> None:
        """Stores a gradient, multiplied by `weight`, in the bucket."""
        if self._numbers is None:
            self._numbers = self._like.new_zeros(self._group.size, sum(self._lengths))
        if gradient is not None:
            column = self._numbers.split(self._lengths, 1)[place]
            flat = padded(gradient.detach().reshape(-1), column.numel())
            torch.mul(flat.view(column.shape), weight, out=column)
        self.missing -= 1

    def start(self) -> None:
        """Starts the sum over the workers."""
        assert self._numbers is not None
        self._sum = self._group.start_sum_of_parts(self._numbers.view(-1))
        self._numbers = None

    def wait(self, seconds: float | None = None) -> bool:
        """Waits, at most `seconds`, for the sum within the group, not for a sum between machines.

        Returns whether the sum within the group is done. If it is, the full gradients are freed.
        """
        assert self._sum is not None
        with metering.waiting_for_workers():
            return self._sum.wait(seconds)

    def total(self, place: int) -> torch.Tensor:
        """Returns this worker's shard of one gradient's sum over the workers."""
        shard = self._shards[place]
        if not self._parts:
            assert self._sum is not None
            with metering.waiting_for_workers():
                self._parts = self._sum.part().split(self._lengths)
        return self._parts[place][: shard.end - shard.begin]


class Buckets:
    """Buckets for the gradients of some variables, in reverse order of the variables.

    All workers have equal buckets. The buckets' collectives start in the order of the buckets, each
    one as soon as its bucket is full and `start_full` is called. The last bucket's all-reduce
    starts when this worker has all gradients, or in `finish`. The last bucket has presence flags,
    which say which gradients this worker has, because an optimizer treats None and zeros
    differently.
    """

    def __init__(
        self,
        like: Mapping[int, torch.Tensor],
        count: int,
        group: ProcessGroup,
        *,
        shards: Mapping[int, Shard],
        beside_gathers: bool = False,
        last_bytes: int | None = None,
        metrics: int = 0,
    ) -> None:
        """Makes buckets for the gradients of the variables that have an entry in `like`.

        The keys of `like` and `shards` are indices of an optimizer's `count` variables. `like` has
        tensors with the shapes and types of the gradients. For an index in `shards`, this worker
        gets only its shard of the gradient's sum. `beside_gathers`: whether weights are gathered at
        the same time. `last_bytes`: the most bytes of gradients in the last bucket. `metrics`: how
        many numbers of metrics are summed with the last bucket.
        """
        channel = _channel(group, beside_gathers)
        summed_whole = {index: one for index, one in like.items() if index not in shards}
        first, *others = in_buckets(summed_whole, group.bytes_per_pack, last_bytes) or [[]]
        sharded = _sharded_together(like, shards, group.bytes_per_pack)
        self._last = Bucket([like[index] for index in first[::-1]], count + metrics, channel)
        self._presence, self.metrics = self._last.room.split([count, metrics])
        self._buckets: list[Bucket | ShardedBucket] = []
        self._places: dict[int, tuple[Bucket | ShardedBucket, int]] = {}
        for members in sorted([*others, *sharded], reverse=True):
            theirs = [like[index] for index in members[::-1]]
            held = [shards[index] for index in members[::-1] if index in shards]
            self._add(
                ShardedBucket(theirs, held, _channel(held[0].group, beside_gathers))
                if held
                else Bucket(theirs, 0, channel),
                members[::-1],
            )
        self._add(self._last, first[::-1])
        self._arrived: set[int] = set()
        self._started = 0
        self._patience = _PATIENCE

    def _add(self, bucket: Bucket | ShardedBucket, indices: Sequence[int]) -> None:
        self._buckets.append(bucket)
        for place, index in enumerate(indices):
            self._places[index] = (bucket, place)

    def clear(self) -> None:
        """Empties the buckets."""
        self._arrived.clear()
        self._started = 0
        for bucket in self._buckets:
            bucket.clear()

    @torch.no_grad()
    def put(self, index: int, gradient: torch.Tensor | None, weight: float) -> None:
        """Stores a gradient, multiplied by `weight`, in the gradient's bucket."""
        bucket, place = self._places[index]
        self._arrived.add(index)
        # The gradient of a torch embedding may be sparse, but the bucket is dense.
        bucket.put(place, None if gradient is None else gradient.to_dense(), weight)

    def start_full(self) -> None:
        """Starts the sums of full buckets, but not the last bucket's, which `start_last` starts."""
        self._start(len(self._buckets) - 1)

    @torch.no_grad()
    def start_last(self, present: Sequence[bool] = ()) -> None:
        """Starts the sum of the last bucket.

        `present` says which gradients this worker has; without it, the worker has all gradients.
        """
        if all(present):
            self._presence.fill_(1)
        else:  # the copy makes the host wait for the device
            self._presence.copy_(torch.tensor(present, dtype=self._presence.dtype))
        self._start(len(self._buckets))

    def finish(
        self, gradients: Gradients, weight: float = 1.0
    ) -> tuple[list[torch.Tensor | None], list[bool]]:
        """Puts the gradients that have not arrived yet into their buckets; waits for all sums.

        Returns the sums, and which variables have a gradient on any worker.
        """
        present = [
            gradient is not None or index in self._arrived
            for index, gradient in enumerate(gradients)
        ]
        for index in self._places:
            if index not in self._arrived:
                self.put(index, gradients[index], weight)
        self.start_full()
        if self._started < len(self._buckets):
            self.start_last(present)
        for bucket in self._buckets:
            bucket.wait()
        if not all(present):
            present = [count > 0 for count in self._presence.tolist()]
        totals: list[torch.Tensor | None] = [None] * len(gradients)
        for index, (bucket, place) in self._places.items():
            totals[index] = bucket.total(place) if present[index] else None
        self.clear()  # the buckets drop the sums of shards, so the caller can free them
        return totals, present

    def _start(self, end: int) -> None:
        while self._started < end and not self._buckets[self._started].missing:
            if isinstance(self._buckets[self._started], ShardedBucket):
                self._wait_for_earlier()
            self._buckets[self._started].start()
            self._started += 1

    def _wait_for_earlier(self) -> None:
        """Waits for running sums, so that few full gradients exist even if the network is slow.

        The wait is limited, because otherwise it could last forever, in this case: the loss of
        another worker does not depend on a weight, so that worker sums the weight's gradient only
        after its backward pass. But its backward pass gathers weights, for which it needs this
        worker, and this worker waits here. After a wait that reached the limit, this object waits
        no more.
        """
        for bucket in self._buckets[: self._started]:
            if isinstance(bucket, ShardedBucket) and not bucket.wait(self._patience):
                self._patience = 0.0
                break


@final
class GradientSum:
    """Sums the workers' gradients after the backward pass.

    Custom steps, loops and optimizers need this class, because the module `reducer` supports only
    Keras's own `train_step` and `optimizer.apply`.
    """

    def __init__(self, group: ProcessGroup, job: Job) -> None:
        self.group = group
        self._job = job
        # The lists of variables on which the workers have agreed, by the variables' ids.
        self._agreed: dict[tuple[int, ...], list[weakref.ref[keras.Variable]]] = {}

    @torch.no_grad()
    def __call__(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Gradients,
        variables: Sequence[keras.Variable],
    ) -> list[torch.Tensor | None]:
        """Returns the sums of the workers' gradients; None for a gradient that no worker has.

        For a sharded gradient the result is this worker's shard of the sum.
        """
        shards = sharded_optimizers.of_gradients(optimizer, variables)
        self.agree(variables, len(gradients))
        like = [
            shape_of(variable) if gradient is None else gradient
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        overwriting = [i for i, one in enumerate(variables) if one.overwrite_with_gradient]
        summed = {index: one for index, one in enumerate(like) if index not in overwriting}
        buckets = Buckets(summed, len(like), self.group, shards=shards)
        totals, somewhere = buckets.finish(gradients)
        for index in overwriting:  # a float8 scale's gradient is the scale's next value
            own = gradients[index]
            own = torch.zeros_like(like[index]) if own is None else own
            if somewhere[index]:
                totals[index] = self.group.gather_alike(own).amax(0)
        return totals

    def agree(self, variables: Sequence[keras.Variable], gradients: int) -> None:
        """Compares the workers' variables and numbers of gradients, once per list of variables."""
        key = tuple(map(id, variables))
        known = self._agreed.get(key)
        # A new variable may have the id of a deleted one, so the objects are compared too.
        if known is not None and all(map(operator.is_, variables, (one() for one in known))):
            return
        paths = {f"variable {number}": unnumbered(one.path) for number, one in enumerate(variables)}
        self._job.assert_equal("gradients", {"number of gradients": gradients, **paths})
        agreed = self._agreed.items()
        there = {ids: of for ids, of in agreed if all(one() is not None for one in of)}
        self._agreed = {**there, key: list(map(weakref.ref, variables))}


def shape_of(variable: keras.Variable) -> torch.Tensor:
    """Returns a tensor with the shape and type of a variable's gradient.

    The memory of the tensor has only one element, which serves all positions.
    """
    stored, shard = keras_compat.stored_value(variable).detach(), shard_of(variable)
    shape = tuple(variable.shape) if shard is None else shard.gradient_shape
    return stored.new_zeros(()).expand(shape)


def _channel(group: ProcessGroup, beside_gathers: bool) -> ProcessGroup:
    return group.of_buckets if beside_gathers else group


def _sharded_together(
    like: Mapping[int, torch.Tensor], shards: Mapping[int, Shard], most_bytes: int | None
) -> list[list[int]]:
    """Groups the indices of sharded variables by `WeightGroup`, or by size if they have none."""
    groups: dict[tuple[int, torch.dtype], list[int]] = {}
    alone: dict[int, torch.Tensor] = {}
    for index, tensor in like.items():
        if index in shards:
            together = shards[index].together
            if together is None:
                alone[index] = tensor
            else:
                groups.setdefault((id(together), tensor.dtype), []).append(index)
    return [*groups.values(), *in_buckets(alone, most_bytes)]


def in_buckets(
    tensors: Mapping[int, torch.Tensor],
    most_bytes: int | None = None,
    first_bytes: int | None = None,
) -> list[list[int]]:
    """Groups the indices of neighbouring tensors of one type and device.

    A group with several tensors has at most `most_bytes`, the first group at most `first_bytes`.
    """
    most = most_bytes or _BUCKET_BYTES
    found: list[list[int]] = []
    filled, limit = 0, min(most, first_bytes or most)
    previous: object = None
    for index, tensor in tensors.items():
        kind = tensor.dtype, tensor.device
        if kind != previous or filled + tensor.nbytes > limit:
            limit = most if found else limit
            found.append([])
            filled = 0
        found[-1].append(index)
        filled += tensor.nbytes
        previous = kind
    return found
