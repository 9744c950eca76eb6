"""Variables that a ``keras.distribution.LayoutMap`` divides over a two-dimensional mesh of workers.

Each worker has one device. A row of the mesh is a replica: its workers compute the same rows of the
batch together, by torch's DTensor (`tensor_parallel.py`). A column has the workers that hold equal
shards, if no layout names the first axis of the mesh; over a column gradients are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import keras
import numpy as np
import torch

from kerasdist import keras_compat
from kerasdist.backends.base.layout_maps import MapReader, other_devices
from kerasdist.backends.torch import private
from kerasdist.backends.torch.state import shards
from kerasdist.backends.torch.state.layout_shards import LayoutShard
from kerasdist.backends.torch.state.sharded_optimizers import ShardedOptimizer, ShardRules
from kerasdist.backends.torch.state.shards import Shard
from kerasdist.backends.torch.state.tensor_parallel import LayoutWeights
from kerasdist.core.ownership import VariableTable
from kerasdist.errors import UnsupportedError

if TYPE_CHECKING:
    from kerasdist.backends.torch.workers.process_group import ProcessGroup
    from kerasdist.job.job import Job


@final
class LayoutOptimizer(ShardedOptimizer):
    """The slots of an optimizer that are laid out as their weights."""

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, row: ProcessGroup, column: ProcessGroup
    ) -> None:
        """Starts without slots."""
        super().__init__(optimizer, row)
        self._column = column
        self._held: list[LayoutShard | None] = []  # by gradient of the running update

    def of_gradients(self, variables: Sequence[keras.Variable]) -> dict[int, Shard]:
        """Returns no gradients: those of a replica's parts are summed as they are."""
        return {}

    def cut(
        self, gradients: Sequence[torch.Tensor], variables: Sequence[keras.Variable]
    ) -> list[torch.Tensor]:
        """Returns this worker's shards of gradients; whole gradients where all of it is updated."""
        self._held.clear()
        found: list[torch.Tensor] = []
        for gradient, variable in zip(gradients, variables, strict=True):
            shard, held = self.updated(variable), shards.shard_of(variable)
            if isinstance(shard, LayoutShard):
                is_whole = tuple(gradient.shape) == shard.shape
                part = shard.cut_inside(gradient) if is_whole else gradient
                found.append(shard.cut_across(part).contiguous())
                self._held.append(shard)
                continue
            if isinstance(held, LayoutShard) and tuple(gradient.shape) != held.shape:
                found.append(held.gather_inside(gradient))
            else:
                found.append(gradient)
            self._held.append(None)
        return found

    @torch.no_grad()
    def _gather(self, weights: Sequence[tuple[torch.Tensor, Shard, torch.Tensor]]) -> None:
        for whole, shard, own in weights:
            whole.copy_(shard.gather(own))

    def squares(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the sum of the squares of each gradient, over the shards of all workers."""
        found = torch.stack([one.square().sum() for one in gradients])
        for group, axis in (self.group, "inner"), (self._column, "outer"):
            divided = [getattr(one, axis, None) is not None for one in self._held]
            is_divided = torch.tensor(divided, device=found.device)
            [total] = group.sums([torch.where(is_divided, found, 0)])
            found = torch.where(is_divided, total, found)
        return found


@final
class LayoutRules(ShardRules):
    """Which variables of a strategy a LayoutMap divides.

    Attributes:
        row: The workers of this worker's replica.
        column: The workers that have this worker's place in their replicas.
    """

    def __init__(self, layout_map: Any, workers: ProcessGroup, job: Job) -> None:
        """Arranges the workers in the mesh. All workers must call it."""
        private.require_interception()
        mesh = layout_map.device_mesh
        kind = "cpu" if workers.device.type == "cpu" else "gpu"
        there = [f"{kind}:{number}" for number in range(job.num_workers)]
        named = [str(name).replace("cuda:", "gpu:") for name in np.ravel(mesh.devices)]
        if named != there:
            raise other_devices(named, there)
        sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
        if len(sizes) != 2:
            raise UnsupportedError(
                "Expected a mesh of two axes for a LayoutMap on PyTorch: one that divides the "
                f"batch, and one for variables. Received: a mesh of {sizes}. Set "
                "KERAS_BACKEND=jax for it."
            )
        super().__init__(workers, job)
        self._axes = list(mesh.axis_names)
        self._reader = MapReader(layout_map, sizes)
        self.row, self.column = workers.in_grid(mesh.shape[1])
        self._owners: VariableTable[Any] = VariableTable()
        self.weights = LayoutWeights(self.row, self._reader, self._axes[1])

    def new_state(self, optimizer: keras.optimizers.Optimizer) -> LayoutOptimizer:
        """Returns the state of an optimizer without slots."""
        return LayoutOptimizer(optimizer, self.row, self.column)

    def require_useful(self) -> None:
        """Raises a ValueError if a key of the map fits no existing variable."""
        self._reader.require_useful()

    def serves(self, variable: keras.Variable) -> bool:
        """Returns whether the map divides a variable that is being made."""
        if shards.shard_of(variable) is None and keras_compat.is_of_optimizer():
            return False  # slots are laid out as their weights, once they are made
        return self._reader.axes(variable, variable.shape) is not None

    def why_whole(self, variable: keras.Variable) -> str:
        """Returns the reason that a table gives for a variable that is not divided."""
        owner = self._owners.get(variable)
        return self._reader.why(variable if owner is None else owner, variable.shape)

    def new_shard(self, variable: keras.Variable) -> LayoutShard:
        """Returns a new shard of a weight, as the map has it."""
        shape = tuple(variable.shape)
        names = self._reader.axes(variable, shape)
        assert names is not None  # the caller has asked
        shard = LayoutShard(shape, names, self._axes, (self.row, self.column))
        shard.why = self.why_whole(variable)
        return shard

    def shards_update(self, optimizer: keras.optimizers.Optimizer, weight: keras.Variable) -> bool:
        """Returns whether an optimizer updates only this worker's shard of a weight."""
        return shards.shard_of(weight) is not None and super().shards_update(optimizer, weight)

    def note_slot(self, weight: keras.Variable, slot: keras.Variable) -> None:
        """Records to which weight a variable of an optimizer belongs."""
        if slot is not weight:
            self._owners.put(slot, weight)
