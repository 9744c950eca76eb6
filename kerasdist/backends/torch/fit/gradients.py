"""Sums the gradients of a process's replicas."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import torch

from kerasdist.backends.torch.replica.placing import moved_together
from kerasdist.errors import ReplicaError

# A replica's gradients, one per variable; None for a variable without gradient.
Gradients = Sequence[torch.Tensor | None]


@torch.no_grad()
def weighted_sum(
    all_gradients: Sequence[Gradients],
    weights: Sequence[float],
    variables: Sequence[keras.Variable],
) -> list[torch.Tensor | None]:
    """Returns the weighted sum of the gradients of a process's replicas, in the order of ranks."""
    if len(all_gradients) == 1 and weights[0] == 1.0:
        return list(all_gradients[0])
    totals: list[torch.Tensor | None] = [None] * len(all_gradients[0])
    # Those whose gradient is the next value (float8: scales, maxima) get the maximum.
    overwritten = {i for i, one in enumerate(variables) if one.overwrite_with_gradient}
    home: torch.device | None = None
    for gradients, weight in zip(all_gradients, weights, strict=True):
        given = {index: one for index, one in enumerate(gradients) if one is not None}
        if not given:
            continue
        home = home or next(iter(given.values())).device
        here = moved_together(home, list(given.values()))
        sums: list[torch.Tensor] = []
        further: list[torch.Tensor] = []
        for index, own, weighted in zip(given, here, torch._foreach_mul(here, weight), strict=True):
            total = totals[index]
            if index in overwritten:
                totals[index] = own if total is None else torch.maximum(total, own)
            elif total is None:
                totals[index] = weighted
            else:
                sums.append(total)
                further.append(weighted)
        if sums:
            torch._foreach_add_(sums, further)
    return totals


def check_same(
    all_gradients: Sequence[Gradients], all_variables: Sequence[list[keras.Variable] | None]
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
