"""Buckets of gradients, each summed over the workers by one all-reduce."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from kerasdist import keras_compat
from kerasdist.backends import metering
from kerasdist.backends.initial_broadcast import unnumbered
from kerasdist.backends.torch.gradients import Gradients

if TYPE_CHECKING:
    from kerasdist.backends.torch.process_group import ProcessGroup, Waitable
    from kerasdist.job.job import Job

# DistributedDataParallel's default: large enough that the latency of a message hardly counts.
_BUCKET_BYTES = 25 * 2**20


@final
class Bucket:
    """Gradients of one type, summed by one all-reduce; the last bucket adds presence flags."""

    def __init__(self, like: Sequence[torch.Tensor], presence: int, device: torch.device) -> None:
        """Makes a bucket for gradients of these shapes and type, and `presence` flags."""
        sizes = [one.numel() for one in like]
        first = like[0].detach() if like else torch.empty((), device=device)
        self.numbers = first.new_zeros(sum(sizes) + presence)
        *pieces, self.presence = self.numbers.split([*sizes, presence])
        self.gradients = [piece.view(one.shape) for piece, one in zip(pieces, like, strict=True)]
        self.missing = len(like)
        self.work: Waitable | None = None


class Buckets:
    """The buckets of some variables, the last variables first. All workers must make the same.

    The all-reduces start in this order, each as soon as its bucket is full. The last bucket waits
    for `finish`, or until all gradients are there: its presence flags say which gradients this
    worker has, since an optimizer treats None and zeros differently.
    """

    def __init__(
        self,
        like: Mapping[int, torch.Tensor],
        count: int,
        group: ProcessGroup,
        channel: dist.ProcessGroup | None = None,
        *,
        last_bytes: int | None = None,
    ) -> None:
        """Makes buckets for those of `count` variables whose index is in `like`."""
        self._group = group
        self._channel = channel
        self._buckets: list[Bucket] = []
        self._places: dict[int, tuple[Bucket, torch.Tensor]] = {}
        last_first = _in_buckets(like, group.bytes_per_pack, last_bytes) or [[]]
        for number, members in reversed([*enumerate(last_first)]):
            indices = members[::-1]
            presence = 0 if number else count
            bucket = Bucket([like[index] for index in indices], presence, group.device)
            self._buckets.append(bucket)
            for index, place in zip(indices, bucket.gradients, strict=True):
                self._places[index] = (bucket, place)
        self._arrived: set[int] = set()
        self._started = 0

    def clear(self) -> None:
        """Empties the buckets."""
        self._arrived.clear()
        self._started = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.gradients)
            bucket.work = None

    @torch.no_grad()
    def put(self, index: int, gradient: torch.Tensor | None, weight: float) -> torch.Tensor:
        """Copies a weighted gradient into its bucket, and starts the sums of full buckets.

        Returns the gradient's place in the bucket.
        """
        bucket, place = self._places[index]
        if gradient is None:
            place.zero_()
        else:
            torch.mul(gradient, weight, out=place)
        self._arrived.add(index)
        bucket.missing -= 1
        self._start(len(self._buckets) - 1)
        return place

    @torch.no_grad()
    def start_last(self) -> None:
        """Starts the sum of the last bucket. This worker has all gradients."""
        self._buckets[-1].presence.fill_(1)
        self._start(len(self._buckets))

    def finish(
        self, gradients: Gradients, weight: float = 1.0
    ) -> tuple[list[torch.Tensor | None], list[bool]]:
        """Fills in the gradients that have not arrived, and waits for all sums.

        Returns the sums, and which variables have a gradient on any worker.
        """
        for index in self._places:
            if index not in self._arrived:
                self.put(index, gradients[index], weight)
        present = [gradient is not None for gradient in gradients]
        last = self._buckets[-1].presence
        if self._started < len(self._buckets):
            if all(present):
                self.start_last()
            else:  # this copy waits for the device
                last.copy_(torch.tensor(present, dtype=last.dtype))
                self._start(len(self._buckets))
        for bucket in self._buckets:
            assert bucket.work is not None
            with metering.waiting_for_workers():
                bucket.work.wait()
        if not all(present):
            present = [count > 0 for count in last.tolist()]
        totals: list[torch.Tensor | None] = [None] * len(gradients)
        for index, (_, place) in self._places.items():
            totals[index] = place if present[index] else None
        return totals, present

    def _start(self, end: int) -> None:
        while self._started < end and not self._buckets[self._started].missing:
            bucket = self._buckets[self._started]
            bucket.work = self._group.start_sum(bucket.numbers, self._channel)
            self._started += 1


@final
class GradientSum:
    """Sums the workers' gradients after the backward pass.

    Custom steps and custom loops need it, since `kerasdist.backends.torch.reducer` supports only
    Keras's own `train_step`.
    """

    def __init__(self, group: ProcessGroup, job: Job) -> None:
        self._group = group
        self._job = job
        self._agreed: set[tuple[int, ...]] = set()

    @torch.no_grad()
    def __call__(self, gradients: Gradients, variables: Sequence[Any]) -> list[torch.Tensor | None]:
        """Returns the sum of the workers' gradients; None where no worker has one."""
        self._agree(variables, len(gradients))
        like = [
            keras_compat.stored_value(variable).detach() if gradient is None else gradient
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        overwriting = [i for i, one in enumerate(variables) if one.overwrite_with_gradient]
        summed = {index: one for index, one in enumerate(like) if index not in overwriting}
        totals, somewhere = Buckets(summed, len(like), self._group).finish(gradients)
        for index in overwriting:  # its gradient is its next value: take the maximum
            own = gradients[index]
            own = torch.zeros_like(like[index]) if own is None else own
            if somewhere[index]:
                totals[index] = self._group.gather_alike(own).amax(0)
        return totals

    def _agree(self, variables: Sequence[Any], gradients: int) -> None:
        key = tuple(map(id, variables))
        if key in self._agreed:
            return
        paths = {f"variable {number}": unnumbered(one.path) for number, one in enumerate(variables)}
        self._job.assert_equal("gradients", {"number of gradients": gradients, **paths})
        self._agreed.add(key)


def in_packs(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yields neighbouring tensors together, of any types, up to the size of a bucket."""
    pack: list[torch.Tensor] = []
    filled = 0
    for tensor in tensors:
        if pack and filled + tensor.nbytes > _BUCKET_BYTES:
            yield pack
            pack, filled = [], 0
        pack.append(tensor)
        filled += tensor.nbytes
    if pack:
        yield pack


def _in_buckets(
    tensors: Mapping[int, torch.Tensor], most_bytes: int | None, first_bytes: int | None
) -> list[list[int]]:
    """Groups the indices of neighbouring tensors of one type and device, up to a size."""
    most = most_bytes or _BUCKET_BYTES
    found: list[list[int]] = []
    filled, limit = 0, min(most, first_bytes or most)
    previous: torch.Tensor | None = None
    for index, tensor in tensors.items():
        kind = tensor.dtype, tensor.device
        alike = previous is not None and (previous.dtype, previous.device) == kind
        if alike and filled + tensor.nbytes <= limit:
            found[-1].append(index)
            filled += tensor.nbytes
        else:
            limit = most if found else limit
            found.append([index])
            filled = tensor.nbytes
        previous = tensor
    return found
