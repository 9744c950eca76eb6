"""Variables that a ``keras.distribution.LayoutMap`` shards over a two-dimensional mesh of workers.

Each worker has one device. The workers of one row of the mesh are a replica: they compute the same
examples together, by torch's DTensor (`tensor_parallel.py`). Gradients are summed over the workers
of one column of the mesh. These workers also hold equal shards of a weight, unless the weight's
layout names the mesh's first axis.
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
from kerasdist.core.ownership import weight_of
from kerasdist.errors import UnsupportedError

if TYPE_CHECKING:
    from kerasdist.backends.torch.workers.process_group import ProcessGroup
    from kerasdist.job.job import Job


@final
class LayoutOptimizer(ShardedOptimizer):
    """The sharded state of an optimizer.

    Each of the optimizer's variables is sharded like the weight to which it belongs.
    """

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, row: ProcessGroup, column: ProcessGroup
    ) -> None:
        """Starts without variables; `row` and `column` are those of this worker in the mesh."""
        super().__init__(optimizer, row)
        self._column = column

    def of_gradients(self, variables: Sequence[keras.Variable]) -> dict[int, Shard]:
        """Returns no shards, because gradients are summed before `cut` takes shards of them."""
        return {}

    def cut(
        self, gradients: Sequence[torch.Tensor], variables: Sequence[keras.Variable]
    ) -> list[torch.Tensor]:
        """Returns shards of gradients, but full gradients for weights that are updated in full."""
        found: list[torch.Tensor] = []
        # For each gradient: whether the workers of a row hold parts of it (`inside`), and whether
        # the workers of a column do (`across`).
        inside, across = [], []
        for gradient, variable in zip(gradients, variables, strict=True):
            shard, held = self.updated(variable), shards.shard_of(variable)
            own = gradient
            if isinstance(shard, LayoutShard):
                own = shard.cut_across(shard.part_of(gradient)).contiguous()
            elif isinstance(held, LayoutShard) and tuple(gradient.shape) != held.shape:
                own = held.gather_inside(gradient)
            found.append(own)
            inside.append(isinstance(shard, LayoutShard) and shard.inner is not None)
            across.append(isinstance(shard, LayoutShard) and shard.outer is not None)
        self._divided = [(self.group, inside), (self._column, across)]
        return found


@final
class LayoutRules(ShardRules):
    """Decides, by a LayoutMap, which variables of a strategy are sharded.

    Attributes:
        row: The workers of this worker's replica.
        column: The workers that have the same position in their replicas as this worker.
    """

    def __init__(self, layout_map: Any, workers: ProcessGroup, job: Job) -> None:
        """Arranges the workers in the mesh. All workers must make this object."""
        private.require_interception()
        mesh = layout_map.device_mesh
        kind = "cpu" if workers.device.type == "cpu" else "gpu"
        there = [f"{kind}:{number}" for number in range(job.num_workers)]
        named = [str(name).replace("cuda:", "gpu:") for name in np.ravel(mesh.devices)]
        if named != there:
            raise other_devices(named, there)
        self._reader = MapReader(layout_map)
        if len(mesh.shape) != 2:
            raise UnsupportedError(
                "Expected a mesh of two axes for a LayoutMap on PyTorch: one that divides the "
                f"batch, and one for variables. Received: a mesh of {self._reader.sizes}. Set "
                "KERAS_BACKEND=jax for such a mesh."
            )
        super().__init__(workers, job)
        self._axes = list(mesh.axis_names)
        self.row, self.column = workers.in_grid(mesh.shape[1])
        self.weights = LayoutWeights(self.row, self._reader, self._axes[1])

    def new_state(self, optimizer: keras.optimizers.Optimizer) -> LayoutOptimizer:
        """Returns a new sharded state for an optimizer."""
        return LayoutOptimizer(optimizer, self.row, self.column)

    def serves(self, variable: keras.Variable) -> bool:
        """Returns whether the map shards a variable that is being made."""
        if shards.shard_of(variable) is None and keras_compat.is_of_optimizer():
            return False  # a variable of an optimizer gets the layout of its weight later
        return self._reader.axes(variable, variable.shape) is not None

    def why_whole(self, variable: keras.Variable) -> str:
        """Returns why a variable is not sharded, in words for the table of `describe_layout`."""
        return self._reader.why(weight_of(variable), variable.shape)

    def new_shard(self, variable: keras.Variable) -> LayoutShard:
        """Returns a new shard of a weight, laid out as the map says."""
        shape = tuple(variable.shape)
        names = self._reader.axes(variable, shape)
        assert names is not None  # this method is called only if `serves` is True
        why = self.why_whole(variable)
        return LayoutShard(shape, names, self._axes, (self.row, self.column), why)

    def shards_update(self, optimizer: keras.optimizers.Optimizer, weight: keras.Variable) -> bool:
        """Returns whether an optimizer updates only this worker's shard of a weight."""
        return shards.shard_of(weight) is not None and super().shards_update(optimizer, weight)
