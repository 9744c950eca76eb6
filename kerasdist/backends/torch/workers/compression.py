"""How numbers are made smaller for the way over the network."""

from __future__ import annotations

from typing import Any, Protocol, final

import torch
import torch.distributed as dist

from kerasdist.collectives import CommunicationOptions

_TYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Waitable(Protocol):
    """Work under way."""

    def wait(self) -> Any:
        """Waits until it is done."""


@final
class Compression:
    """Sums gradients over the workers, in a smaller type if the user wants that."""

    def __init__(self, options: CommunicationOptions) -> None:
        """Makes it.

        Args:
            options: How to communicate.
        """
        self._dtype = _TYPES[options.compression]

    @property
    def is_none(self) -> bool:
        """Whether everything travels in its own type."""
        return self._dtype is None

    @property
    def dtype_name(self) -> str | None:
        """The name of the type in which everything travels, None for its own."""
        return None if self._dtype is None else str(self._dtype).removeprefix("torch.")

    def start_sum(self, flat: torch.Tensor) -> Waitable:
        """Begins to sum a contiguous tensor over the workers, in place.

        Args:
            flat: The tensor.

        Returns:
            What to wait for.
        """
        if self._is_small(flat):
            work: Any = dist.all_reduce(flat, async_op=True)
            return work
        return self.start_future_sum(flat)

    def start_future_sum(self, flat: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Begins to sum a contiguous tensor over the workers, in place.

        Args:
            flat: The tensor.

        Returns:
            What to wait for; its value is the tensor.
        """
        small = flat if self._is_small(flat) else flat.to(self._dtype)
        work: Any = dist.all_reduce(small, async_op=True)

        def summed(_: Any) -> torch.Tensor:
            return flat if small is flat else flat.copy_(small)

        return work.get_future().then(summed)

    def _is_small(self, flat: torch.Tensor) -> bool:
        """Whether a tensor travels as it is."""
        return self._dtype is None or flat.itemsize <= self._dtype.itemsize
