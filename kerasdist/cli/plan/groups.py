"""Computes how much `sharding="full"` on PyTorch sends over the network and keeps in memory.

On JAX, XLA decides when weights are gathered, so a plan reads the gathers from the compiled
program. On PyTorch, weights are gathered in groups, which follow from the model's layers (ADR 62).
A group has the weights of one layer, or of several small layers. Each group is gathered in the
forward pass. In the backward pass, each group is gathered again, except the last one, whose weights
are still in memory. The gradients of a group are summed by one collective. While one group
computes, the next group is being gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, final

from kerasdist.cli.plan.hlo import Collective
from kerasdist.core.hardware import Target
from kerasdist.core.sharding import GROUP_BYTES, Sharding

if TYPE_CHECKING:
    import keras

# The fraction of a step's computation that can hide the collectives of one kind. The forward pass,
# a third of the computation, hides its gathers. In the backward pass, which is two thirds, gathers
# of weights and sums of gradients share the network. So one third counts for each of the two kinds.
_PASS = 1 / 3


@final
@dataclass(frozen=True)
class WeightGroups:
    """The groups of a model's weights, and what each worker keeps in memory.

    Attributes:
        sizes: The bytes of each group's weights, in the order of the model's layers.
        whole: The bytes of weights that are too small to be sharded. The gradients of these weights
            take the same number of bytes.
        held: The bytes of variables and gradients that a worker keeps.
    """

    sizes: Sequence[int]
    whole: int
    held: int

    @property
    def gathered(self) -> int:
        """The most bytes of gathered weights at any time: those of two consecutive groups."""
        return max(map(sum, pairwise([*self.sizes, 0])), default=0)

    def collectives(self) -> list[Collective]:
        """Returns the collectives of a step.

        A collective is hidden by the work of the group that computes at the same time. The work of
        a group is estimated from the group's fraction of the bytes of all groups. This estimate is
        too high for embeddings and too low for convolutions.
        """
        work = [_PASS * size / sum(self.sizes) for size in self.sizes]
        before, after = [0.0, *work][: len(work)], work[1:]
        kinds = ["all-gather"] * (2 * len(self.sizes) - 1) + ["reduce-scatter"] * len(self.sizes)
        sizes = [*self.sizes, *self.sizes[:-1], *self.sizes]
        # In the backward pass, group i is gathered while group i + 1 computes, and the gradients of
        # group i are summed while group i - 1 computes.
        hidden = [*before, *after, *before]
        each = zip(kinds, sizes, hidden, strict=True)
        sums = [Collective(kind, size, 0, overlap) for kind, size, overlap in each]
        return [*sums, Collective("all-reduce", self.whole, 0, 0.0)]


def weight_groups(
    model: keras.Model, sharding: object, target: Target, limit: int = GROUP_BYTES
) -> WeightGroups | None:
    """Returns the groups in which PyTorch's workers gather weights; None if they gather none.

    Args:
        model: A compiled and built model.
        sharding: The `sharding` of the model's strategy.
        target: The devices, of which each worker has one.
        limit: The most bytes of a group that has the weights of several small layers.
    """
    from kerasdist.keras_compat import nbytes  # imported late, because it imports Keras

    if not isinstance(sharding, Sharding) or not sharding.divides_weights:
        return None
    if target.chip.platform != "cuda" or target.devices == 1:
        return None
    sizes: list[int] = []
    whole = 0
    last = ""
    for variable in model.trainable_variables:
        size, layer = nbytes(variable), variable.path.rpartition("/")[0]
        if sharding.is_small(variable.shape):
            whole += size
            continue
        if sizes and (layer == last or sizes[-1] + size <= limit):
            sizes[-1] += size
        else:
            sizes.append(size)
        last = layer
    others = [*model.non_trainable_variables, *model.metrics_variables]
    slots = sum(
        nbytes(one) // (1 if sharding.is_small(one.shape) else target.devices)
        for one in model.optimizer.variables
    )
    weights = 2 * (sum(sizes) // target.devices + whole)  # the weights and their gradients
    return WeightGroups(sizes, whole, weights + slots + sum(map(nbytes, others)))
