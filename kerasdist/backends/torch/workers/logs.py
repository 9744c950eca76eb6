"""What a worker's step reports, made what one device's step reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

import keras
import torch

from kerasdist.keras_seam import ops
from kerasdist.structures import pack


@final
class Logs:
    """The numbers that one worker's step returned, on their way to be those of the global batch.

    As in `kerasdist.training.logs`: an entry that equals the chief's own result of the metric of
    that name is that metric's, any other one is a mean over the worker's examples.
    """

    def __init__(
        self, logs: Any, results: dict[str, Any], weight: float, *, is_chief: bool
    ) -> None:
        """Takes the numbers.

        Args:
            logs: What the step returned: a dict of scalars, or anything of scalars.
            results: This worker's own results of the metrics, after its step.
            weight: Its share of the examples.
            is_chief: Whether its word counts on what is no mean.
        """
        self._logs = logs
        self._leaves = [(name, _as_tensor(leaf)) for name, leaf in _leaves("", logs)]
        self._parts: list[torch.Tensor] = []
        for name, leaf in self._leaves:
            if leaf is None:
                continue
            counts = weight if leaf.is_floating_point() else float(is_chief)
            self._parts.append(leaf.detach().double().reshape(-1) * counts)
            is_result = leaf.new_zeros((), dtype=torch.float64)
            if is_chief and name in results and not keras.tree.is_nested(results[name]):
                is_result = (leaf == results[name]).all().double()
            self._parts.append(is_result.reshape(1))

    @property
    def parts(self) -> Sequence[torch.Tensor]:
        """What to add up over the workers."""
        return [torch.cat(self._parts)] if self._parts else []

    def combined(self, totals: Sequence[torch.Tensor], global_results: dict[str, Any]) -> Any:
        """Returns the logs of the global batch.

        Args:
            totals: The sums of `parts`.
            global_results: The results of the metrics after the step, over all workers.
        """
        pieces = iter(totals[0].split([len(part) for part in self._parts]) if totals else ())
        values = []
        for name, leaf in self._leaves:
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
    """The leaves of a structure, each with the key of the innermost dict that holds it."""
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
