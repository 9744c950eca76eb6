"""What `sharding="full"` exchanges and keeps on PyTorch, whose workers gather weights by groups.

XLA places its gathers by itself, and they are read from its program. PyTorch's are known without
one (ADR 62): a group is a layer's weights, or those of small layers together. Each is gathered in
the forward pass, again in the backward pass except for the last one, which is still there, and its
gradients are summed once. The next group is under way while one computes.
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

# The forward pass is a third of a step's work. The backward pass is two: one that hides gathers and
# one that hides sums, as both want the network then.
_PASS = 1 / 3


@final
@dataclass(frozen=True)
class WeightGroups:
    """The groups of a model, and what each of several workers keeps.

    Attributes:
        sizes: The bytes of each group's weights, in the order of the model's layers.
        whole: The bytes of weights that are too small to be sharded, and so of their gradients.
        held: The bytes that a worker keeps of variables and gradients.
    """

    sizes: Sequence[int]
    whole: int
    held: int

    @property
    def gathered(self) -> int:
        """The most bytes of gathered weights at any time: of two groups, one after another."""
        return max(map(sum, pairwise([*self.sizes, 0])), default=0)

    def collectives(self) -> list[Collective]:
        """Returns the collectives of a step.

        What hides one is the work of the group that computes meanwhile. That is taken to be the
        group's part of all bytes: too much for embeddings, too little for convolutions.
        """
        work = [_PASS * size / sum(self.sizes) for size in self.sizes]
        before, after = [0.0, *work][: len(work)], work[1:]
        kinds = ["all-gather"] * (2 * len(self.sizes) - 1) + ["reduce-scatter"] * len(self.sizes)
        sizes = [*self.sizes, *self.sizes[:-1], *self.sizes]
        hidden = [*before, *after, *before]  # the backward pass goes from the last to the first
        each = zip(kinds, sizes, hidden, strict=True)
        sums = [Collective(kind, size, 0, overlap) for kind, size, overlap in each]
        return [*sums, Collective("all-reduce", self.whole, 0, 0.0)]


def planned_groups(model: keras.Model, sharding: object, target: Target) -> WeightGroups | None:
    """Returns the groups of PyTorch's workers on a target, None if these gather no weights."""
    if not isinstance(sharding, Sharding) or not sharding.divides_weights:
        return None
    if target.chip.platform != "cuda" or target.devices == 1:
        return None
    return weight_groups(model, sharding, target.devices)


def weight_groups(
    model: keras.Model, sharding: Sharding, workers: int, limit: int = GROUP_BYTES
) -> WeightGroups:
    """Returns the groups in which PyTorch's workers gather a model's weights.

    Args:
        model: A compiled and built model.
        sharding: How its strategy shards; it divides weights.
        workers: How many there are.
        limit: How many bytes the weights of small layers are together.
    """
    from kerasdist.keras_compat import nbytes  # late: it imports Keras, which a model has done

    sizes: list[int] = []
    whole = 0
    layer = last = ""
    for variable in model.trainable_variables:
        size, dtype = nbytes(variable), variable.dtype
        if sharding.is_small(variable.shape):
            whole += size
            continue
        joins = variable.path.rpartition("/")[0] == layer or sum(sizes[-1:]) + size <= limit
        if sizes and dtype == last and joins:
            sizes[-1] += size
        else:
            sizes.append(size)
        layer, last = variable.path.rpartition("/")[0], dtype
    others = [*model.non_trainable_variables, *model.metrics_variables]
    slots = sum(
        nbytes(one) // (1 if sharding.is_small(one.shape) else workers)
        for one in model.optimizer.variables
    )
    weights = 2 * (sum(sizes) // workers + whole)  # and their gradients
    return WeightGroups(sizes, whole, weights + slots + sum(map(nbytes, others)))
