"""Describes the block of a variable that a worker of a mesh holds; cuts and gathers blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from kerasdist import keras_compat
from kerasdist.backends.torch.state.shards import Block, Shard, draw_all
from kerasdist.core.sharding import Region

if TYPE_CHECKING:
    from kerasdist.backends.torch.workers.process_group import ProcessGroup


@final
class LayoutShard(Shard):
    """Describes which block of a variable this worker holds; cuts and gathers such blocks.

    Attributes:
        inner: The variable's axis that is sharded over the workers of a replica; None if there is
            no such axis.
        outer: The variable's axis that is sharded over the replicas; None if there is no such axis.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        names: Sequence[str | None],
        axes: Sequence[str],
        groups: tuple[ProcessGroup, ProcessGroup],
        why: str,
    ) -> None:
        """Reads a layout: `names` has a mesh axis, or None, for each axis of the variable.

        `axes` are the names of the mesh's two axes: first the axis of the replicas, then the axis
        of the workers within a replica. `groups` are this worker's row and column of the mesh.
        """
        across, inside = axes
        self.row, self.column = groups
        super().__init__(shape, self.row)
        self.inner = names.index(inside) if inside in names else None
        self.outer = names.index(across) if across in names else None
        self.is_first = (self.inner is not None or self.row.rank == 0) and (
            self.outer is not None or self.column.rank == 0
        )
        whole = torch.empty(shape, device="meta")
        self.gradient_shape = tuple(self.cut_inside(whole).shape)
        self.own_shape = tuple(self.cut(whole).shape)
        shown = ["replica" if one == across else str(one) for one in names]
        self.described = f"({', '.join(shown)})", why

    def region(self) -> Region | None:
        """Returns which elements this worker holds.

        Returns None if two axes are sharded, because no `Region` can describe such a block.
        """
        if self.inner is not None and self.outer is not None:
            return None
        axis, group = (self.outer, self.column) if self.inner is None else (self.inner, self.row)
        assert axis is not None  # at least one axis is sharded
        each = self.shape[axis] // group.size
        return Region.along(self.shape, axis, group.rank * each, (group.rank + 1) * each)

    def blocks(self) -> list[Block]:
        """Returns the one block of the variable that this worker holds."""
        begins = [0] * len(self.shape)
        for axis, group in ((self.inner, self.row), (self.outer, self.column)):
            if axis is not None:
                begins[axis] = group.rank * self.own_shape[axis]
        return [(tuple(begins), self.own_shape)]

    def cut_inside(self, whole: Any) -> Any:
        """Cuts a full value along the axis `inner`, if any; returns this worker's part."""
        return _block(whole, self.inner, self.row)

    def part_of(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns this worker's part of a full gradient.

        If `gradient` is already a part, returns it as it is.
        """
        return self.cut_inside(gradient) if tuple(gradient.shape) == self.shape else gradient

    def cut_across(self, part: Any) -> Any:
        """Returns this worker's shard of a part that `cut_inside` has returned."""
        return _block(part, self.outer, self.column)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this worker's shard of a whole value."""
        return self.cut_across(self.cut_inside(whole.detach().to_dense())).contiguous()

    def copy_cut(self, own: torch.Tensor, whole: np.ndarray[Any, Any], dtype: str) -> None:
        """Copies this worker's shard of a NumPy array into `own`."""
        part = np.ascontiguousarray(self.cut_across(self.cut_inside(whole)))
        own.copy_(keras_compat.ops.convert_to_tensor(part, dtype=dtype))

    def gather_across(self, own: torch.Tensor) -> torch.Tensor:
        """Joins the shards of a column's workers to the part that `cut_inside` returns.

        All workers must call this method.
        """
        return _joined(own, self.outer, self.column)

    @torch.no_grad()
    def gather_inside(self, part: torch.Tensor) -> torch.Tensor:
        """Joins the parts to the full value. All workers of a replica must call this method."""
        return _joined(part, self.inner, self.row)

    @torch.no_grad()
    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Returns the whole value from the workers' shards. All workers must call this method."""
        draw_all()
        return self.gather_inside(self.gather_across(own.detach()))


def _block(whole: Any, axis: int | None, group: ProcessGroup) -> Any:
    if axis is None:
        return whole
    each = whole.shape[axis] // group.size
    begin = group.rank * each
    return whole[(slice(None),) * axis + (slice(begin, begin + each),)]


def _joined(own: torch.Tensor, axis: int | None, group: ProcessGroup) -> torch.Tensor:
    return own if axis is None else torch.cat(group.gather_alike(own).unbind(), axis)
