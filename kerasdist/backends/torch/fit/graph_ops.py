"""Collectives as custom operators of torch, which ``torch.compile`` can include in its graphs.

Compiled code cannot contain Python objects, so an operator gets a number, by which it finds the
collectives of its replica. An operator sends the same messages as uncompiled code, so the model may
be compiled on some workers and uncompiled on others. The operators have a tag that keeps the
compiler from merging two calls with equal arguments.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

_TAGS = (torch.Tag.nondeterministic_seeded,)

_numbers = itertools.count()
_replicas: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def numbered(replica: object) -> int:
    """Registers the collectives of a replica; returns the number by which operators find them."""
    number = next(_numbers)
    _replicas[number] = replica
    return number


def replica_of(number: int) -> Any:
    """Returns the collectives of the replica that has this number."""
    return _replicas[number]


@torch.library.custom_op(
    "kerasdist::all_sum",
    mutates_args=(),
    schema="(Tensor[] tensors, int replica) -> Tensor[]",
    tags=_TAGS,
)
def all_sum(tensors: Sequence[torch.Tensor], replica: int) -> list[torch.Tensor]:
    """Returns each tensor summed over the replicas."""
    own = replica_of(replica)
    own.scope.sums_in_backward = True
    return own.exchange(own.label("all_sum"), tensors)


@torch.library.custom_op(
    "kerasdist::weighted_sum",
    mutates_args=(),
    schema="(Tensor[] tensors, int replica, str of) -> Tensor[]",
    tags=_TAGS,
)
def _weighted_sum(tensors: Sequence[torch.Tensor], replica: int, of: str) -> list[torch.Tensor]:
    """Sums the replicas' gradients with the factors that `collectives.GlobalSum` describes."""
    own = replica_of(replica)
    weight = own.gradient_weight
    sums = own.exchange(own.label(f"gradient of {of}"), [one * weight for one in tensors])
    return [one / weight for one in sums]


@torch.library.custom_op(
    "kerasdist::all_stack",
    mutates_args=(),
    schema="(Tensor tensor, int replica, int replicas) -> Tensor",
    tags=_TAGS,
)
def all_stack(tensor: torch.Tensor, replica: int, replicas: int) -> torch.Tensor:
    """Returns the replicas' tensors stacked along a new first axis."""
    own = replica_of(replica)
    own.scope.sums_in_backward = True
    return own.combine(own.label("all_stack"), tensor)


def _like(tensors: Sequence[torch.Tensor], *others: object) -> list[torch.Tensor]:
    return [torch.empty_like(one) for one in tensors]


all_sum.register_fake(_like)
_weighted_sum.register_fake(_like)
all_stack.register_fake(lambda one, _, replicas: one.new_empty((replicas, *one.shape)))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.replica = inputs[1]


def _of_all_sum(ctx: Any, gradients: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    return _weighted_sum(gradients, ctx.replica, "all_sum"), None


def _of_all_stack(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    [total] = _weighted_sum([gradient], ctx.replica, "all_stack")
    return total[replica_of(ctx.replica).rank], None, None


all_sum.register_autograd(_of_all_sum, setup_context=_keep)
all_stack.register_autograd(_of_all_stack, setup_context=_keep)
