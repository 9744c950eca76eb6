"""Combines the logs of the replicas' steps into those of one device's step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

import keras
import torch

from kerasdist.keras_compat import ops
from kerasdist.structures import pack


class Report(NamedTuple):
    """The logs of one replica's step.

    Attributes:
        logs: What the step returned.
        results: The replica's own results of the metrics; empty where `Logs` does not need them.
    """

    logs: Any
    results: dict[str, Any]


@final
class Logs:
    """Combines the logs that the steps of a process's replicas returned.

    As in `kerasdist.training.logs`: an entry that equals the first replica's own result of the
    metric of that name becomes the metric's global result, any other a mean over the examples.
    """

    def __init__(
        self, reports: Sequence[Report], weights: Sequence[float], *, is_chief: bool
    ) -> None:
        """Takes the reports of the replicas in this process, and their shares of the examples."""
        self._logs, results = reports[0]
        columns = zip(*(_leaves("", report.logs) for report in reports), strict=True)
        self._leaves = [
            (column[0][0], [_as_tensor(leaf) for _, leaf in column]) for column in columns
        ]
        self._parts: list[torch.Tensor] = []
        for name, leaves in self._leaves:
            first = leaves[0]
            if first is None:
                continue
            if first.is_floating_point():
                self._parts.append(_weighted_sum(leaves, weights))
            else:
                self._parts.append(_weighted_sum(leaves[:1], [float(is_chief)]))
            is_result = first.new_zeros((), dtype=torch.float64)
            if is_chief and name in results and not keras.tree.is_nested(results[name]):
                is_result = (first == results[name]).all().double()
            self._parts.append(is_result.reshape(1))

    @property
    def parts(self) -> Sequence[torch.Tensor]:
        """The tensors to sum over the processes."""
        return [torch.cat(self._parts)] if self._parts else []

    def combined(self, totals: Sequence[torch.Tensor], global_results: dict[str, Any]) -> Any:
        """Returns the global batch's logs, from the summed `parts` and the metrics' results."""
        pieces = iter(totals[0].split([len(part) for part in self._parts]) if totals else ())
        values = []
        for name, (leaf, *_) in self._leaves:
            if leaf is None:
                values.append(None)
                continue
            mean, is_result = next(pieces).view(leaf.shape).to(leaf.dtype), next(pieces)[0]
            if name in global_results and not keras.tree.is_nested(global_results[name]):
                result = ops.cast(global_results[name], keras.backend.standardize_dtype(leaf.dtype))
                mean = torch.where(is_result > 0.5, result, mean)
            values.append(mean)
        return pack(self._logs, values)


def _leaves(name: str, logs: Any) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a structure, each with the key of the innermost dict that holds it."""
    if isinstance(logs, dict):
        for key, inner in logs.items():
            yield from _leaves(key, inner)
    elif isinstance(logs, list | tuple):
        for inner in logs:
            yield from _leaves(name, inner)
    else:
        yield name, logs


def _as_tensor(leaf: Any) -> torch.Tensor | None:
    return None if leaf is None else ops.convert_to_tensor(leaf)


def _weighted_sum(leaves: Sequence[Any], weights: Sequence[float]) -> torch.Tensor:
    numbers = [leaf.detach().to(leaves[0].device).double().reshape(-1) for leaf in leaves]
    return sum(one * weight for one, weight in zip(numbers, weights, strict=True))  # type: ignore[return-value]
