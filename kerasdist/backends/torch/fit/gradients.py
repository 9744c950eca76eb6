"""Sums the gradients of a process's replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from kerasdist.backends.torch.replica.placing import moved_together
from kerasdist.errors import ReplicaError

_OVERWRITES = attrgetter("overwrite_with_gradient")

# A replica's gradients, one per variable; None for a variable without gradient.
Gradients = Sequence[torch.Tensor | None]


def weighted_sum(
    all_gradients: Sequence[Gradients], weights: Sequence[float], variables: Sequence[Any]
) -> list[torch.Tensor | None]:
    """Returns the weighted sum of the gradients of a process's replicas, in the order of ranks."""
    with torch.no_grad():
        tensors = [[g for g in gradients if g is not None] for gradients in all_gradients]
        if min(map(len, tensors)) < len(variables) or any(map(_OVERWRITES, variables)):
            columns = zip(variables, zip(*all_gradients, strict=True), strict=False)
            return [_sum_of_one(variable, column, weights) for variable, column in columns]
        if set(weights) == {1.0}:
            return [*_sum_of_tensors(tensors)]
        return [*_weighted_sum_of_tensors(tensors, weights)]


def _sum_of_tensors(all_tensors: Sequence[list[torch.Tensor]]) -> Sequence[torch.Tensor]:
    total: Sequence[torch.Tensor] = all_tensors[0]
    for index in range(1, len(all_tensors)):
        here = moved_together(total[0].device, all_tensors[index]) if total else []
        if index == 1:
            total = torch._foreach_add([*total], here)
        else:
            torch._foreach_add_([*total], here)
    return total


def _weighted_sum_of_tensors(
    all_tensors: Sequence[list[torch.Tensor]], weights: Sequence[float]
) -> Sequence[torch.Tensor]:
    # A running mean takes one pass per replica. It is the weighted sum if the weights sum to 1.
    mean: Sequence[torch.Tensor] = all_tensors[0]
    weight = weights[0]
    for index in range(1, len(weights)):
        here = moved_together(mean[0].device, all_tensors[index]) if mean else []
        weight += weights[index]
        part = weights[index] / weight
        if index == 1:
            mean = torch._foreach_lerp([*mean], here, part)
        else:
            torch._foreach_lerp_([*mean], here, part)
    # The weights do not sum to 1 if the losses were weighted: see `weights_scaled_losses`.
    return mean if math.isclose(weight, 1.0) else torch._foreach_mul([*mean], weight)


def _sum_of_one(
    variable: Any, column: Sequence[torch.Tensor | None], weights: Sequence[float]
) -> torch.Tensor | None:
    pairs = [(g, weight) for g, weight in zip(column, weights, strict=True) if g is not None]
    if not pairs:
        return None
    device = pairs[0][0].device
    if variable.overwrite_with_gradient:
        # Its gradient is its next value (float8: scales, histories of maxima): take the maximum.
        parts = [gradient.to(device) for gradient, _ in pairs]
        return torch.stack(parts).amax(0)
    total = pairs[0][0] * pairs[0][1]
    for gradient, weight in pairs[1:]:
        total = total + gradient.to(device) * weight
    return total


def check_same(
    all_gradients: Sequence[Gradients], all_variables: Sequence[list[Any] | None]
) -> None:
    """Checks that the replicas bring gradients of the same variables."""
    keys = [None if variables is None else [*map(id, variables)] for variables in all_variables]
    sizes = [*map(len, all_gradients)]
    if keys.count(keys[0]) < len(keys) or len(set(sizes)) > 1:
        raise ReplicaError(
            "Expected every replica to apply gradients of the same variables in the same order. "
            f"Received: {sizes} gradients a replica, of variables that differ. Replicas differ in "
            "their batch only: choose the variables to update without looking at the data."
        )
