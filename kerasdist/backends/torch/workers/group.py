"""Collectives between the processes that hold replicas.

The replicas of one process are threads, whose values are combined at the rendezvous
(`collectives.py`). The process's group then combines the result with those of other processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from kerasdist.backends.torch.state.shards import Shard

ALL_WHOLE: Mapping[int, Shard] = {}
"""No variable is divided."""


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

    def sum_gradients(
        self,
        gradients: Sequence[torch.Tensor | None],
        variables: Sequence[Any],
        shards: Mapping[int, Shard] = ALL_WHOLE,
    ) -> list[torch.Tensor | None]:
        """Returns gradients summed over the processes; None where no process has one.

        Of those whose index is in `shards`, this process's parts of the sums.
        """
        del variables, shards
        return list(gradients)

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
