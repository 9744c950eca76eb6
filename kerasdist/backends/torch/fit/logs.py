"""Combines the logs of the replicas' steps into those of one device's step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch

from kerasdist.core.structures import flatten, pack
from kerasdist.keras_compat import ops


@final
class Logs:
    """Combines the logs that the steps of a process's replicas returned: floats by their mean.

    Of all else, and of what is equal on all replicas, it is the first replica's value.
    """

    def __init__(self, logs: Sequence[Any], weights: Sequence[float], *, is_chief: bool) -> None:
        """Takes the logs of the replicas in this process, and their shares of the examples."""
        self._logs = logs[0]
        self._leaves: list[Any] = []
        self._parts: list[torch.Tensor] = []
        for leaves in zip(*map(flatten, logs), strict=True):
            if leaves[0] is None or isinstance(leaves[0], str):
                self._leaves.append(leaves[0])
                continue
            tensors: list[torch.Tensor] = [ops.convert_to_tensor(leaf) for leaf in leaves]
            self._leaves.append(tensors[0])
            if tensors[0].is_floating_point():
                self._parts.append(_weighted_sum(tensors, weights))
            else:
                self._parts.append(_weighted_sum(tensors[:1], [float(is_chief)]))

    @property
    def parts(self) -> Sequence[torch.Tensor]:
        """The tensors to sum over the processes."""
        return [torch.cat(self._parts)] if self._parts else []

    def combined(self, totals: Sequence[torch.Tensor]) -> Any:
        """Returns the global batch's logs, from the summed `parts`."""
        values = iter(totals[0].split([len(part) for part in self._parts]) if totals else ())
        return pack(
            self._logs,
            [
                next(values).view(leaf.shape).to(leaf.dtype)
                if isinstance(leaf, torch.Tensor)
                else leaf
                for leaf in self._leaves
            ],
        )


def _weighted_sum(leaves: Sequence[Any], weights: Sequence[float]) -> torch.Tensor:
    numbers = [leaf.detach().to(leaves[0].device).double().reshape(-1) for leaf in leaves]
    return sum(one * weight for one, weight in zip(numbers, weights, strict=True))  # type: ignore[return-value]
