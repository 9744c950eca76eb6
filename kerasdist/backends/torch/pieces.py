"""Dividing a global batch into one piece a replica, and joining what comes out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import keras
import torch

from kerasdist import keras_seam
from kerasdist.errors import InputError
from kerasdist.input.sharding import piece_bounds
from kerasdist.replica_context import BatchShare


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
    sizes = {leaf.shape[0] for leaf in arrays(batch)}
    if len(sizes) > 1:
        shapes = [tuple(leaf.shape) for leaf in arrays(batch)]
        raise InputError(
            "Expected all arrays of a batch to have as many rows, one an example. "
            f"Received: shapes={shapes}. Hand a table that is not part of the batch to the model "
            "itself, or repeat it a row an example."
        )
    total = next(iter(sizes), 0)
    bounds = piece_bounds(total, min(replicas, total)) if total > 1 else ()
    if len(bounds) < 2:
        return None
    pieces = tuple(_cut(batch, begin, end) for begin, end in bounds)
    return Division(pieces, tuple(end - begin for begin, end in bounds), total)


def arrays(structure: Any) -> Iterator[Any]:
    """Yields the arrays of a batch.

    Not by `keras.tree`, whose walk costs a tenth of a small step.

    Args:
        structure: Arrays or tensors, in any structure.
    """
    if isinstance(structure, dict):
        structure = structure.values()
    elif not isinstance(structure, tuple | list):
        if _has_rows(structure):
            yield structure
        return
    for inner in structure:
        yield from arrays(inner)


def _cut(structure: Any, begin: int, end: int) -> Any:
    """The rows from `begin` to `end` of every array."""
    if isinstance(structure, dict):
        return {key: _cut(inner, begin, end) for key, inner in structure.items()}
    if isinstance(structure, tuple | list):
        parts = [_cut(inner, begin, end) for inner in structure]
        if isinstance(structure, list):
            return parts
        return type(structure)(*parts) if type(structure) is not tuple else tuple(parts)
    if not _has_rows(structure):
        return structure
    rows = structure[begin:end]
    # Slices of one tensor share the counter by which torch notices changes in place, such as Keras
    # makes in a mask, and one replica's would spoil another's backward pass. `data` has its own.
    return rows.data if isinstance(rows, torch.Tensor) and not rows.requires_grad else rows


def join(outputs: Sequence[Any]) -> Any:
    """Puts the replicas' predictions one after another.

    Args:
        outputs: What each replica predicted: tensors with the examples along axis 0, in any
            structure.
    """
    return keras.tree.map_structure(lambda *parts: _joined(parts), *outputs)


def _joined(parts: Sequence[Any]) -> Any:
    if not _has_rows(parts[0]):
        return parts[0]  # None, or a scalar that belongs to no example
    if all(isinstance(part, torch.Tensor) for part in parts):
        return torch.cat([part.to(parts[0].device) for part in parts])
    return keras_seam.ops.concatenate(parts)


def _has_rows(leaf: Any) -> bool:
    """Whether a leaf is an array with an axis of examples."""
    return len(getattr(leaf, "shape", ())) > 0
