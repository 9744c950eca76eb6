"""Dividing a global batch into one piece a replica, and joining what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import keras
import torch

from kerasdist import keras_seam
from kerasdist.input.dividing import examples, has_rows, rows, with_weights_in_rows
from kerasdist.input.sharding import piece_bounds
from kerasdist.input.shares import WorkerRows
from kerasdist.replica_context import BatchShare
from kerasdist.structures import map_leaves


@final
@dataclass(frozen=True, eq=False)
class Part:
    """What one replica gets of a step.

    Attributes:
        argument: What its function is called with.
        share: Its share of the global batch where the one-device contract holds, else None.
    """

    argument: Any
    share: BatchShare | None = None

    @property
    def weight(self) -> float:
        """How much this replica counts in a sum over the replicas."""
        return 1.0 if self.share is None else self.share.weight


@final
@dataclass(frozen=True, eq=False)
class Division:
    """A global batch in pieces.

    Attributes:
        pieces: One piece a replica, none of them empty.
        sizes: How many examples each piece holds.
        total: How many examples there are.
    """

    pieces: tuple[Any, ...]
    sizes: tuple[int, ...]
    total: int

    @property
    def weights(self) -> list[float]:
        """Each replica's share of the examples."""
        return [size / self.total for size in self.sizes]

    @property
    def parts(self) -> list[Part]:
        """What each replica gets."""
        total = self.total
        return [
            Part(piece, BatchShare(size, total, size / total))
            for piece, size in zip(self.pieces, self.sizes, strict=True)
        ]


def divide(batch: Any, replicas: int) -> Division | None:
    """Cuts a batch into consecutive pieces, as equal as can be.

    None and scalars go to every replica. With fewer examples than replicas there are fewer pieces.

    Args:
        batch: Arrays or tensors with the examples along axis 0, in any structure.
        replicas: How many replicas there are.

    Returns:
        The pieces, or None where there is nothing to divide: less than two examples, or no array.

    Raises:
        InputError: If the arrays differ in their number of examples.
    """
    batch = with_weights_in_rows(batch, _tensor)
    total = examples(batch)
    bounds = piece_bounds(total, min(replicas, total)) if total > 1 else ()
    if len(bounds) < 2:
        return None
    pieces = tuple(_cut(batch, begin, end) for begin, end in bounds)
    return Division(pieces, tuple(end - begin for begin, end in bounds), total)


def piece_of(batch: Any, replica: int, replicas: int) -> Part | None:
    """Returns one replica's piece of a batch, without cutting the others'.

    Args:
        batch: Arrays or tensors with the examples along axis 0, in any structure; or the piece, if
            that is all that this process has.
        replica: The replica's number.
        replicas: How many replicas there are.

    Returns:
        The piece and its share, or None where there are fewer examples than replicas.

    Raises:
        InputError: If the arrays differ in their number of examples.
    """
    if isinstance(batch, WorkerRows):
        share = BatchShare(batch.size, batch.total, batch.size / batch.total)
        return Part(map_leaves(_tensor, batch.rows), share)
    batch = with_weights_in_rows(batch, _tensor)
    total = examples(batch)
    if total < replicas:
        return None
    begin, end = piece_bounds(total, replicas)[replica]
    size = end - begin
    return Part(_cut(batch, begin, end), BatchShare(size, total, size / total))


def _tensor(leaf: Any) -> Any:
    return leaf if leaf is None else keras_seam.ops.convert_to_tensor(leaf)


def _cut(batch: Any, begin: int, end: int) -> Any:
    """The examples from `begin` to `end`."""
    return rows(batch, begin, end, _with_own_counter)


def _with_own_counter(piece: Any) -> Any:
    # Slices of one tensor share the counter by which torch notices changes in place, such as Keras
    # makes in a mask, and one replica's would spoil another's backward pass. `data` has its own.
    return piece.data if isinstance(piece, torch.Tensor) and not piece.requires_grad else piece


def join(outputs: Sequence[Any]) -> Any:
    """Puts the replicas' predictions one after another.

    Args:
        outputs: What each replica predicted: tensors with the examples along axis 0, in any
            structure.
    """
    return keras.tree.map_structure(lambda *parts: _joined(parts), *outputs)


def _joined(parts: Sequence[Any]) -> Any:
    if not has_rows(parts[0]):
        return parts[0]  # None, or a scalar that belongs to no example
    if all(isinstance(part, torch.Tensor) for part in parts):
        return torch.cat([part.to(parts[0].device) for part in parts])
    return keras_seam.ops.concatenate(parts)
