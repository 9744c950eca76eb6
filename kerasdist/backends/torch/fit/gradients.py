"""Sums the gradients of a process's replicas."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import torch

from kerasdist.backends.base.checks import differing_calls
from kerasdist.backends.torch import internals
from kerasdist.backends.torch.replica.placing import move_together

# The gradients of a replica, one per variable; None for a variable without a gradient.
Gradients = Sequence[torch.Tensor | None]


@torch.no_grad()
def weighted_sum(
    all_gradients: Sequence[Gradients],
    weights: Sequence[float],
    variables: Sequence[keras.Variable],
    home: torch.device,
) -> list[torch.Tensor | None]:
    """Returns, for each variable, the weighted sum of the gradients on a process's replicas.

    `weights` has one factor for each replica: its fraction of the rows. The gradients are added in
    the order of the replicas, on `home`, the variables' device.
    """
    is_sum = len(all_gradients) > 1
    totals: list[torch.Tensor | None] = [None] * len(all_gradients[0])
    # What counts as the gradient of some variables, such as scales for float8, is the variable's
    # next value. The replicas' next values are not added: the variable gets their maximum.
    overwritten = {i for i, one in enumerate(variables) if one.overwrite_with_gradient}
    for gradients, weight in zip(all_gradients, weights, strict=True):
        given = {index: one for index, one in enumerate(gradients) if one is not None}
        if not given:
            continue
        here = move_together(home, list(given.values()))
        sums: list[torch.Tensor] = []
        further: list[torch.Tensor] = []
        is_weighted = is_sum or weight != 1.0
        all_weighted = internals.MULTIPLY_EACH.value(here, weight) if is_weighted else here
        for index, own, weighted in zip(given, here, all_weighted, strict=True):
            total = totals[index]
            if index in overwritten:
                totals[index] = own if total is None else torch.maximum(total, own)
            elif total is None:
                totals[index] = weighted
            else:
                sums.append(total)
                further.append(weighted)
        if sums:
            internals.ADD_TO_EACH.value(sums, further)
    return totals


def check_same(
    all_gradients: Sequence[Gradients], all_variables: Sequence[list[keras.Variable] | None]
) -> None:
    """Checks that all replicas have gradients of the same variables."""
    keys = [None if variables is None else [*map(id, variables)] for variables in all_variables]
    sizes = [*map(len, all_gradients)]
    if keys.count(keys[0]) < len(keys) or len(set(sizes)) > 1:
        raise differing_calls(f"{sizes} gradients a replica, or gradients of other variables")
