"""torch's own reducer, which sums gradients while the backward pass runs.

``DistributedDataParallel`` puts parameters into buckets, and sums a bucket over the workers as soon
as the backward pass has filled it. It wants a module whose forward pass it can watch. A Keras
model's is not to be watched (``Layer.__call__`` leaves out torch's hooks), so it is given the bare
parameters, and its reducer is told when a step begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch.nn.parallel import DistributedDataParallel

from kerasdist.backends.torch.workers.compression import Compression

_MEBIBYTE = 2**20


@final
class Reducer:
    """Sums the gradients of some parameters, each step's once.

    A worker whose loss does not depend on some of them makes up for it by a backward pass over
    nothing, since the others wait for the sums. Whether anybody has a gradient there, a marker
    tells: one parameter more, whose gradient is a one for each of the others. It lies in the last
    bucket, which no worker sums before its step has come to all of them.

    Attributes:
        factor: How many times larger the loss is made, which torch divides its means by.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        *,
        workers: int,
        compression: Compression | None,
        bucket_bytes: int,
    ) -> None:
        """Makes the reducer. All workers must call it, with the same parameters.

        Args:
            parameters: Leaves that require gradients.
            workers: How many workers there are.
            compression: How the sums travel; None: torch makes means of the gradients of a loss
                that is as many times larger, without a call of Python for each bucket.
            bucket_bytes: How large a bucket may be; 0: as torch has it.
        """
        self._parameters = list(parameters)
        first = parameters[0]
        self._marker = torch.nn.Parameter(first.new_zeros(len(parameters)).detach())
        self._torchs = DistributedDataParallel(
            torch.nn.ParameterList([*parameters, self._marker]),
            gradient_as_bucket_view=True,  # in place of copies
            init_sync=False,  # the variables are equal already
            bucket_cap_mb=bucket_bytes / _MEBIBYTE if bucket_bytes else None,
        )
        self.factor = workers
        if compression is not None:
            self.factor = 1
            # A lambda, as torch compares annotations with its own types.
            self._torchs.register_comm_hook(
                None, lambda _, bucket: compression.start_future_sum(bucket.buffer())
            )
        self._settle()

    def serves(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Returns whether these are the parameters that it was made for, still to be trained.

        Args:
            parameters: The parameters.
        """
        pairs = zip(parameters, self._parameters, strict=True)
        return all(one is own and one.requires_grad for one, own in pairs)

    def begin(self) -> None:
        """Starts a step: the next backward pass is summed, and none after it."""
        self._marker.grad = None
        # What the forward pass of a DistributedDataParallel does, as there is none.
        reducer = self._torchs.reducer
        reducer.prepare_for_forward()
        reducer._rebuild_buckets()
        reducer.prepare_for_backward([])

    def marked(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns what is to be differentiated for a loss, so that the marker has a gradient, too.

        Args:
            loss: This step's loss.
        """
        return torch.add(self._marker.sum(), loss, alpha=self.factor)

    def finish(self) -> frozenset[int]:
        """Makes the sums that this worker's backward pass did not come to.

        Returns:
            The ids of the parameters of which no worker has a gradient. Those of all others are in
            ``grad`` now.
        """
        present = [parameter.grad is not None for parameter in self._parameters]
        if all(present):
            return frozenset()
        marker = self._marker.grad
        assert marker is not None  # the loss was `marked`
        marker.copy_(marker.new_tensor([float(has) for has in present]))
        with torch.enable_grad():
            self._nothing_of(p for p in self._parameters if p.grad is None).backward()
        counts = zip(self._parameters, marker.tolist(), strict=True)
        nowhere = [parameter for parameter, count in counts if not count]
        for parameter in nowhere:
            parameter.grad = None
        return frozenset(map(id, nowhere))

    def close(self) -> None:
        """Takes the reducer away from the parameters, in the middle of a step or between two."""
        self._torchs._remove_autograd_hooks()

    def _settle(self) -> None:
        """Lets all workers know which bucket holds what, before a step depends on it.

        torch arranges the buckets anew after the first pass, in the order in which it came to the
        parameters. So the first two are passes over nothing, in the order of most models, the last
        parameters first; and the marker at the end.
        """
        for _ in range(2):
            self.begin()
            with torch.enable_grad():
                # What comes first here comes last in the backward pass.
                nothing = self._nothing_of([self._marker, *self._parameters])
                nothing.backward()
        for parameter in self._parameters:
            parameter.grad = None

    def _nothing_of(self, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
        """A loss of zero that depends on parameters, the last of them first when differentiated."""
        nothing = torch.zeros((), device=self._marker.device)
        for parameter in parameters:
            # Of no values, as those may be infinite.
            nothing = nothing + parameter.flatten()[:0].sum()
        return nothing
