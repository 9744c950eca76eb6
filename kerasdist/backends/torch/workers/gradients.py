"""Gradients summed over the workers when the backward pass has ended.

The way for all that `kerasdist.backends.torch.workers.overlap` cannot do while it runs: custom
steps and custom loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

import torch

from kerasdist import keras_seam
from kerasdist.backends.equal_start import unnumbered
from kerasdist.backends.torch.workers.compression import Compression, Waitable
from kerasdist.backends.torch.workers.group import Group
from kerasdist.collectives import CommunicationOptions
from kerasdist.job.job import Job

# What DistributedDataParallel takes: large enough that a message's own cost does not count.
_PACK_BYTES = 25 * 2**20


@final
class GradientSum:
    """Sums gradients in packs; while one travels, the next is put together.

    Attributes:
        options: How to communicate.
        compression: The part of it that says how numbers travel.
    """

    def __init__(self, group: Group, job: Job, options: CommunicationOptions) -> None:
        """Makes it.

        Args:
            group: The workers.
            job: The job of this process.
            options: How to communicate.
        """
        self._group = group
        self._job = job
        self.options = options
        self.compression = Compression(options)
        self._agreed: set[tuple[int, ...]] = set()

    @torch.no_grad()
    def __call__(
        self,
        gradients: Sequence[torch.Tensor | None],
        variables: Sequence[Any],
        weight: float,
    ) -> list[torch.Tensor | None]:
        """Returns the weighted sum of the workers' gradients; None where no worker has one.

        Args:
            gradients: This worker's gradients; None where there is none.
            variables: The variables they belong to.
            weight: This worker's weight.

        Raises:
            DisagreementError: If workers bring gradients of other variables.
        """
        self._agree(variables, len(gradients))
        tensors = [
            torch.zeros_like(keras_seam.stored_value(variable)).detach()
            if gradient is None
            else gradient.detach()
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        present = [float(gradient is not None) for gradient in gradients]
        travelling: list[tuple[list[int], torch.Tensor, Waitable]] = []
        for pack in list(self._packs(tensors, variables)) or [[]]:
            parts = [tensors[index].reshape(-1) for index in pack]
            if weight != 1.0:
                parts = [*torch._foreach_mul(parts, weight)]
            if not travelling:
                # Who has a gradient travels along: a worker whose branch of the model was not taken
                # must not be waited for.
                like = parts[0] if parts else torch.empty((), device=self._group.device)
                parts.append(like.new_tensor(present))
            flat = torch.cat(parts)
            travelling.append((pack, flat, self.compression.start_sum(flat)))
        totals: list[torch.Tensor | None] = list(tensors)
        for pack, flat, work in travelling:
            work.wait()
            sizes = [tensors[index].numel() for index in pack]
            pieces = flat[: sum(sizes)].split(sizes)
            for index, piece in zip(pack, pieces, strict=True):
                totals[index] = piece.view(tensors[index].shape)
        for index, variable in enumerate(variables):
            if variable.overwrite_with_gradient:
                # Not a gradient but a new value (float8: scales and histories of maxima), as Keras
                # combines it.
                totals[index] = self._group.gather_alike(tensors[index]).amax(0)
        if not all(present):
            known = travelling[0][1][-len(present) :].tolist()
            totals = [total if has else None for total, has in zip(totals, known, strict=True)]
        return totals

    def _packs(
        self, tensors: Sequence[torch.Tensor], variables: Sequence[Any]
    ) -> Iterator[list[int]]:
        by_type: dict[torch.dtype, list[int]] = {}
        for index, (tensor, variable) in enumerate(zip(tensors, variables, strict=True)):
            if not variable.overwrite_with_gradient:
                by_type.setdefault(tensor.dtype, []).append(index)
        for members in by_type.values():
            pack, size = [], 0
            for index in members:
                pack.append(index)
                size += tensors[index].nbytes
                if size >= (self.options.bytes_per_pack or _PACK_BYTES):
                    yield pack
                    pack, size = [], 0
            if pack:
                yield pack

    def _agree(self, variables: Sequence[Any], gradients: int) -> None:
        key = tuple(map(id, variables))
        if key in self._agreed:
            return
        paths = {f"variable {number}": unnumbered(one.path) for number, one in enumerate(variables)}
        self._job.agree("gradients", {"number of gradients": gradients, **paths})
        self._agreed.add(key)
