"""Divided weights in a step: gathered where a layer reads them, once more in the backward pass.

The graph of a step has one leaf per weight, of the weight's shape, which holds values only while
its weight is among those that were read last. A layer that reads a weight gets a view of the leaf,
which keeps the values alive as long as the layer uses it. Code outside of layers gets the leaf
itself, at which it finds the gradient; its values stay until the step ends. Autograd would keep
each weight that an operation saves for the backward pass; it is given a note in its place, by which
the weight is gathered again (``torch.autograd.graph.saved_tensors_hooks``).

The gathers are collectives: all workers must read the same weights in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch

from kerasdist import keras_compat
from kerasdist.backends.torch.state.shards import Shard, shard_of
from kerasdist.core.variable_table import VariableTable

# How many weights stay gathered: as many as a recurrent cell reads in turn.
_KEPT = 2

# A weight that is gathered more often in a step stays gathered in the steps that follow: it is one
# of several that a layer reads in turn.
_MOST_GATHERS = 8


@final
class Leaf:
    """The leaf of one weight in the graphs of steps, kept from step to step with its gradient."""

    def __init__(self, variable: Any, shard: Shard) -> None:
        """Makes a leaf without values."""
        self._stored = keras_compat.stored_value(variable)
        self._shard = shard
        # Stands in for values that are not gathered: NaN, so that a read by mistake shows.
        self._nothing = self._stored.new_full((), torch.nan).detach().expand(shard.shape)
        self.tensor = self._nothing.detach().requires_grad_(self._stored.requires_grad)
        self.address = 0
        # Whether it stays gathered until the end of this step; and of every step.
        self.is_used_itself = self.stays = False

    def serves(self, stored: torch.Tensor) -> bool:
        """Returns whether this leaf stands for the tensor that the variable holds now."""
        return stored is self._stored and stored.requires_grad == self.tensor.requires_grad

    @property
    def version(self) -> int:
        """A number that every change of the values increases."""
        return self._stored._version

    def gather(self) -> None:
        """Gathers the values. All workers must call it."""
        whole = self._shard.whole(self._stored)
        self.tensor.data = whole
        self.address = whole.untyped_storage().data_ptr()

    def release(self) -> None:
        """Drops the values."""
        self.tensor.data = self._nothing
        self.address = 0
        self.is_used_itself = False


@final
@dataclass(frozen=True, eq=False)
class _Saved:
    """A view of a weight, in the place of the tensor that autograd saves."""

    leaf: Leaf
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    version: int


@final
class GatheredWeights:
    """The divided weights of a process's replica, as its steps see them.

    Attributes:
        are_differentiated: Whether the backward pass of Keras's own `train_step` is over, after
            which that reads gradients alone, until the optimizer's update.
    """

    def __init__(self, *, in_layers: bool) -> None:
        """Starts without weights; `in_layers`: layers read them, not the optimizer alone."""
        self.are_differentiated = False
        self._in_layers = in_layers
        self._leaves: VariableTable[Leaf] = VariableTable()
        self._gathered: list[Leaf] = []
        self._by_address: dict[int, Leaf] = {}
        self._counts: Counter[Leaf] = Counter()

    def leaf(self, variable: Any, shard: Shard) -> Leaf:
        """Returns the leaf of a divided variable, whether or not it is gathered."""
        leaf = self._leaves.get(variable)
        if leaf is None or not leaf.serves(keras_compat.stored_value(variable)):
            leaf = Leaf(variable, shard)
            self._leaves.put(variable, leaf)
        return leaf

    def read(self, variable: Any) -> torch.Tensor | None:
        """Returns a divided variable's value, None if the variable is whole on each worker."""
        shard = shard_of(variable)
        if shard is None:
            return None
        leaf = self.leaf(variable, shard)
        if self.are_differentiated:
            return leaf.tensor
        self._gather(leaf)
        if keras_compat.is_in_layer():
            return leaf.tensor.view_as(leaf.tensor)
        leaf.is_used_itself = True
        return leaf.tensor

    @contextmanager
    def in_step(self) -> Generator[None]:
        """Lets autograd save references to weights, not values; releases the weights at the end."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with hooks if self._in_layers else nullcontext():
            try:
                yield
            finally:
                self.release()
                for leaf, count in self._counts.items():
                    leaf.stays = leaf.stays or count > _MOST_GATHERS
                self._counts.clear()

    def release(self) -> None:
        """Drops the values of all weights, as after an update."""
        for leaf in self._gathered:
            leaf.release()
        self._gathered.clear()
        self._by_address.clear()
        self.are_differentiated = False

    def _gather(self, leaf: Leaf) -> None:
        if leaf.address:
            self._gathered.remove(leaf)
        else:
            leaf.gather()
            self._counts[leaf] += 1
            self._by_address[leaf.address] = leaf
        self._gathered.append(leaf)
        passing = [one for one in self._gathered if not (one.stays or one.is_used_itself)]
        for one in passing[:-_KEPT]:
            self._gathered.remove(one)
            del self._by_address[one.address]
            one.release()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        if tensor.layout is not torch.strided:
            return tensor
        leaf = self._by_address.get(tensor.untyped_storage().data_ptr())
        if leaf is None:
            return tensor
        return _Saved(
            leaf,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            leaf.version,
        )

    def _unpack(self, saved: torch.Tensor | _Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        if saved.version != saved.leaf.version:  # autograd itself refuses a changed tensor
            raise RuntimeError(
                "Expected a backward pass before the weights that it needs are updated. Received: "
                f"a changed weight of shape={tuple(saved.leaf.tensor.shape)}. Take the gradients "
                "of both losses first, then apply them."
            )
        self._gather(saved.leaf)
        whole = saved.leaf.tensor.detach()
        return whole.as_strided(saved.shape, saved.stride, saved.offset)
