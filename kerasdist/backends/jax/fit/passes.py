"""Calls a model in passes, each for a few rows of each device, so that a step needs less memory.

The passes are a `jax.lax.map` over `jax.checkpoint`, so XLA computes one pass after another,
forward and backward, and keeps only the inputs of each pass. The code that calls the model gets the
outputs of all rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import numpy as jnp

from kerasdist import keras_compat
from kerasdist.core.context import current
from kerasdist.core.structures import Arguments, flatten, pack
from kerasdist.training import passes


@dataclass(frozen=True)
class Rows:
    """The rows of a batch, divided so that each pass has the same number of rows of each replica.

    If the batch cannot be divided evenly, the last row is repeated. The outputs of the repeated
    rows are dropped, so these rows add nothing to gradients.
    """

    count: int
    replicas: int
    passes: int

    @property
    def own(self) -> int:
        """The largest number of rows that a replica has."""
        return -(-self.count // self.replicas)

    @property
    def size(self) -> int:
        """How many rows of each replica a pass has."""
        return -(-self.own // self.passes)

    def split(self, rows: Any) -> Any:
        """Returns the rows, divided into passes along a new first axis."""
        rest = rows.shape[1:]
        rows = _padded(rows, self.replicas * self.own, axis=0)
        rows = _padded(rows.reshape(self.replicas, self.own, *rest), self.passes * self.size, 1)
        rows = rows.reshape(self.replicas, self.passes, self.size, *rest)
        return rows.swapaxes(0, 1).reshape(self.passes, self.replicas * self.size, *rest)

    def join(self, rows: Any) -> Any:
        """Returns the rows of all passes in the order that they had before `split`."""
        rest = rows.shape[2:]
        rows = rows.reshape(self.passes, self.replicas, self.size, *rest).swapaxes(0, 1)
        rows = rows.reshape(self.replicas, self.passes * self.size, *rest)[:, : self.own]
        return rows.reshape(self.replicas * self.own, *rest)[: self.count]


def rows_of_passes(trainer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rows | None:
    """Returns how the rows of a call in a step are divided into passes; None for a single pass."""
    most, replica = passes.most_rows(trainer), current.replica
    if most is None or replica is None or replica.num_replicas_in_sync > 1:
        return None
    if kwargs.get("training") is False:
        return None
    count, divisor = passes.rows_of(args), trainer.replicas.num_replicas
    # A batch with fewer rows than replicas is not divided among the replicas.
    divisor = divisor if count >= divisor else 1
    number = -(-count // (divisor * most))
    return Rows(count, divisor, number) if number > 1 else None


def calls(
    trainer: Any, call: Callable[..., Any], state: Sequence[Any], given: Arguments, rows: Rows
) -> tuple[Any, list[Any]]:
    """Calls a model in passes; returns the outputs of all rows, and the regularizers' losses.

    `call` is a function that calls the model and returns outputs, state and losses.
    """
    model, arrays = trainer.model, trainer.replicas.arrays
    trainer.require_passes()
    leaves: list[Any] = flatten(given)
    divided = [i for i, leaf in enumerate(leaves) if _has_rows(leaf, rows.count)]
    forms: list[Any] = []  # the structure of the outputs, known only after tracing

    def one(own: Any) -> Any:
        every = list(leaves)
        for index, (leaf, mask) in zip(divided, arrays.shard_batch(own), strict=True):
            every[index] = leaf
            if mask is not None:
                keras_compat.set_keras_mask(leaf, mask)
        outputs, after, losses = pack(given, every).call(partial(call, return_losses=True))
        passes.require_nothing_kept(model, map(operator.is_not, state, after), losses)
        forms[:] = [outputs]
        found = flatten(outputs)
        for leaf in found:
            if leaf is not None and not _has_rows(leaf, rows.replicas * rows.size):
                raise passes.refused(f"an output of shape {leaf.shape}")
        return [(leaf, keras_compat.get_keras_mask(leaf)) for leaf in found], losses

    pairs = [(leaves[index], keras_compat.get_keras_mask(leaves[index])) for index in divided]
    done, losses = jax.lax.map(jax.checkpoint(one), jax.tree.map(rows.split, pairs))
    done = arrays.shard_batch(jax.tree.map(rows.join, done))
    for leaf, mask in done:
        if mask is not None:
            keras_compat.set_keras_mask(leaf, mask)
    return pack(forms[0], [leaf for leaf, _ in done]), [loss[0] for loss in losses]


def _has_rows(leaf: Any, count: int) -> bool:
    return isinstance(leaf, jax.Array) and leaf.ndim > 0 and leaf.shape[0] == count


def _padded(rows: Any, size: int, axis: int) -> Any:
    missing = [(0, size - rows.shape[axis] if axis == one else 0) for one in range(rows.ndim)]
    return jnp.pad(rows, missing, mode="edge") if size > rows.shape[axis] else rows
