"""How numbers are made smaller for the way over the network."""

from __future__ import annotations

from typing import Any, final

import torch
import torch.distributed as dist

from kerasdist.collectives import CommunicationOptions

_TYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}


@final
class Compression:
    """Sums gradients over the workers, in a smaller type if the user wants that."""

    def __init__(self, options: CommunicationOptions) -> None:
        """Makes it.

        Args:
            options: How to communicate.
        """
        self._dtype = _TYPES[options.compression]

    def start_sum(self, flat: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Begins to sum a contiguous tensor over the workers, in place.

        Args:
            flat: The tensor.

        Returns:
            What to wait for; its value is the tensor.
        """
        small = flat
        if self._dtype is not None and flat.itemsize > self._dtype.itemsize:
            small = flat.to(self._dtype)
        work: Any = dist.all_reduce(small, async_op=True)

        def summed(_: Any) -> torch.Tensor:
            return flat if small is flat else flat.copy_(small)

        return work.get_future().then(summed)
