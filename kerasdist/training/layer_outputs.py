"""The outputs and added losses of layers on replicas, compared with one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from kerasdist.training.differences import Difference, difference
from kerasdist.training.probe import Calls
from kerasdist.training.trial_workers import TrialWorkers

Shape = Sequence[int]


@final
class LayerOutputs:
    """Compares the outputs of layers' calls; each worker compares its own replicas' outputs."""

    def __init__(self, workers: TrialWorkers, sizes: Sequence[int], tolerance: float) -> None:
        self._workers = workers
        self._sizes = sizes
        self._tolerance = tolerance

    def differences(self, alone: Calls, divided: Calls) -> list[tuple[Any, Difference]]:
        """Returns how outputs differ, in the order of calls, while replicas call the same layers.

        All workers must call it.
        """
        expected = alone.get(None, [])
        own = {key: _same_calls(expected, divided[key]) for key in self._counting(divided)}
        shapes = self._of_everyone(
            "shapes of the outputs of layers",
            {key: [[one.shape for one in call] for call in calls] for key, calls in own.items()},
        )
        found: list[tuple[Any, Difference]] = []
        for index, (layer, arrays) in enumerate(expected):
            if not shapes or any(len(calls) <= index for calls in shapes.values()):
                break
            for column, whole in enumerate(arrays):
                if all(len(calls[index]) > column for calls in shapes.values()):
                    pieces = {key: calls[index][column] for key, calls in own.items()}
                    forms = {key: calls[index][column] for key, calls in shapes.items()}
                    found.append((layer, self._of_pieces(layer.name, whole, pieces, forms)))
        rows = [dataclasses.astuple(one) for _, one in found]
        everyone = self._workers.everyone("outputs of layers that differ", rows)
        layers = [layer for layer, _ in found]
        return [
            (layer, max((Difference(*row) for row in by_worker), key=lambda one: one.relative))
            for layer, by_worker in zip(layers, zip(*everyone, strict=True), strict=True)
        ]

    def added(self, added: Mapping[Any, Sequence[tuple[Any, Any]]]) -> dict[int, list[float]]:
        """Returns the losses that layers add on each replica, in order.

        All workers must call it.
        """
        own = {key: [float(one) for _, one in added[key]] for key in self._counting(added)}
        return self._of_everyone("losses that layers add", own)

    def _counting(self, by_replica: Mapping[Any, Any]) -> list[int]:
        """Returns the replicas that have examples, in order."""
        return sorted(key for key in by_replica if key is not None and self._sizes[key])

    def _of_everyone(self, label: str, own: Mapping[int, Any]) -> dict[int, Any]:
        """Returns the values of all workers' replicas, in order."""
        everyone = self._workers.everyone(label, [[*pair] for pair in own.items()])
        return dict(sorted((key, value) for theirs in everyone for key, value in theirs))

    def _of_pieces(
        self,
        name: str,
        whole: Any,
        pieces: Mapping[int, Any],
        shapes: Mapping[int, Shape],
    ) -> Difference:
        forms = [tuple(shape) for shape in shapes.values()]
        if _make_up(whole, forms):
            first = min(pieces, default=0)
            begin = sum(shape[0] for key, shape in shapes.items() if key < first)
            own = [*pieces.values()]
            joined = np.concatenate(own) if own else whole[:0]
            expected = whole[begin : begin + len(joined)]
            return difference(name, expected, joined, self._tolerance)
        if all(form == whole.shape for form in forms):
            found = [difference(name, whole, one, self._tolerance) for one in pieces.values()]
            none = Difference(name, 0.0, 0.0, 0.0, 0.0, self._tolerance)
            return max(found, key=lambda one: one.relative, default=none)
        return Difference(name, np.nan, np.nan, np.inf, np.inf, self._tolerance)


def _make_up(whole: Any, forms: Sequence[tuple[int, ...]]) -> bool:
    """Returns whether pieces of these shapes, concatenated, have the shape of the whole."""
    if not whole.ndim or not all(forms):
        return False
    tails = {form[1:] for form in forms} | {whole.shape[1:]}
    return len(tails) == 1 and sum(form[0] for form in forms) == whole.shape[0]


def _same_calls(
    expected: Sequence[tuple[Any, Any]], calls: Sequence[tuple[Any, Any]]
) -> list[list[Any]]:
    """Returns the outputs of calls, up to the first call of another layer than on one device."""
    outputs = []
    for (layer, _), (called, arrays) in zip(expected, calls, strict=False):
        if called is not layer:
            break
        outputs.append(arrays)
    return outputs
