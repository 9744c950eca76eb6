"""Gathers sharded weights when layers read them, and again in the backward pass.

Weights are gathered and freed in groups (`shards.WeightGroup`). While layers use one group, the
group that came after it in an earlier step is gathered ahead (`GatheredWeights._following`). So at
most two groups are gathered at any time. A step with N groups makes N gathers in the forward pass,
and N - 1 in the backward pass, because the last group is still gathered when the backward pass
begins.

The graph of a step has one leaf per weight. The leaf has the weight's shape, but holds values only
while the weight's group is gathered. A layer that reads a weight gets a view of the leaf, which
keeps the values alive as long as the layer uses them. Code outside of layers gets the leaf itself,
because such code may read the gradient, which autograd stores in the leaf. After such a read, the
leaf's group stays gathered until the step ends.

By default, autograd keeps in memory each weight that an operation saves for the backward pass. Here
``torch.autograd.graph.saved_tensors_hooks`` make autograd save a small reference instead, by which
the backward pass gathers the weight again.

The gathers are collectives, so all workers must read the same weights in the same order.
"""

from __future__ import annotations

import abc
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import keras
import torch

from kerasdist import keras_compat
from kerasdist.backends.base import metering
from kerasdist.backends.torch import internals
from kerasdist.backends.torch.state.shards import Shard, WeightGroup, shard_of
from kerasdist.core.ownership import VariableTable

if TYPE_CHECKING:
    from kerasdist.backends.torch.workers.process_group import Waitable

# A point of a step: how many groups have been used, which group was used last, and whether autograd
# was recording at that use, as it does in the forward pass.
_Place = tuple[int, WeightGroup | None, bool]


@final
class Leaf:
    """The autograd leaf of one sharded weight. The leaf and its gradient outlive a step."""

    def __init__(self, variable: keras.Variable, shard: Shard) -> None:
        """Makes a leaf without values."""
        assert shard.together is not None  # a weight always belongs to a group
        self.group = shard.together
        self._stored = keras_compat.stored_value(variable)
        # The values while the weight is not gathered: NaN, so that a read by mistake is noticed (0
        # for integers).
        nothing = torch.nan if self._stored.is_floating_point() else 0
        self._nothing = self._stored.new_full((), nothing).detach().expand(shard.shape)
        self.tensor = self._nothing.detach().requires_grad_(self._stored.requires_grad)
        self.address = 0

    def serves(self, stored: torch.Tensor) -> bool:
        """Returns whether this leaf was made for `stored`, the tensor that the variable has now."""
        return stored is self._stored and stored.requires_grad == self.tensor.requires_grad

    @property
    def version(self) -> int:
        """A number that grows with every change of the weight's values."""
        return internals.COUNT_OF_CHANGES.of(self._stored)

    def fill(self, whole: torch.Tensor) -> None:
        """Gives the gathered values to the tensor that the model reads."""
        self.tensor.data = whole
        self.address = whole.untyped_storage().data_ptr()

    def release(self) -> None:
        """Drops the gathered values."""
        self.tensor.data = self._nothing
        self.address = 0


@final
@dataclass(frozen=True, eq=False)
class _Saved:
    """A reference to a view of a weight, which autograd saves in place of the tensor."""

    leaf: Leaf
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    version: int


class ShardedWeights(abc.ABC):
    """Gives the steps of a process's replica the values of sharded weights.

    Attributes:
        are_differentiated: Whether the backward pass of Keras's own `train_step` is over. From then
            until the optimizer's update, that step reads only gradients, so no weight is gathered.
        advice: A sentence for error messages, which tells a user how to leave a weight unsharded.
    """

    are_differentiated = False
    advice: str

    def add(self, variable: keras.Variable, shard: Shard) -> None:  # noqa: B027
        """Adds a new weight; does nothing in a class that finds weights when they are read."""

    @abc.abstractmethod
    def tensor(self, variable: keras.Variable) -> torch.Tensor | None:
        """Returns the autograd leaf of a weight; None for a weight that is read as it is stored."""

    @abc.abstractmethod
    def read(self, variable: keras.Variable) -> torch.Tensor | None:
        """Returns the value of a weight; None for a weight that is read as it is stored."""

    def has_frozen(self, value: object) -> bool:
        """Returns whether an object is the full tensor of a gathered weight that is not trained."""
        return False

    @abc.abstractmethod
    def in_step(self) -> AbstractContextManager[None]:
        """Returns a context in which a replica runs its step."""

    @abc.abstractmethod
    def release(self) -> None:
        """Drops gathered values, for example after an update."""

    def plain(self, structure: Any) -> Any:
        """Returns a structure in which a plain tensor, the full value, replaces each DTensor."""
        return structure

    def joint(self, structure: Any) -> Any:
        """Returns a structure whose tensors can be combined with weights, which may be DTensors."""
        return structure

    def equalize(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the tensors, made equal on all workers of a replica."""
        return list(tensors)

    def own_gradient(self, gradient: torch.Tensor, variable: keras.Variable) -> torch.Tensor:
        """Returns this worker's part of a weight's gradient, before the sum over the replicas."""
        return gradient


@final
class GatheredWeights(ShardedWeights):
    """Sharded weights whose full values each worker gathers when a layer reads them."""

    advice = "Raise min_size of kerasdist.Sharding, so that each worker has the variable whole."

    def __init__(self, *, in_layers: bool) -> None:
        """Starts without weights. `in_layers` is False if only optimizers are sharded."""
        self._in_layers = in_layers
        self._newest: WeightGroup | None = None
        self._leaves: VariableTable[Leaf] = VariableTable()
        self._gathered: dict[WeightGroup, list[Leaf]] = {}
        # The group that is being gathered before a layer uses it, and its gather. There is at most
        # one such group.
        self._ahead: dict[WeightGroup, tuple[Waitable, torch.Tensor]] = {}
        self._by_address: dict[int, Leaf] = {}
        self._used: WeightGroup | None = None
        # The point that the current step has reached. `_following` has, for each point of earlier
        # steps, the group that was used next.
        self._place: _Place = (0, None, False)
        self._following: dict[_Place, WeightGroup | None] = {}

    def add(self, variable: keras.Variable, shard: Shard) -> None:
        """Adds a new weight to the newest group, or to a new group."""
        if self._newest is not None and self._newest.accepts(variable):
            self._newest.add(variable, shard)
        else:
            self._newest = WeightGroup(variable, shard)

    def leaf(self, variable: keras.Variable, shard: Shard) -> Leaf:
        """Returns the leaf of a sharded variable, whether or not it has values at present."""
        leaf = self._leaves.get(variable)
        if leaf is None or not leaf.serves(keras_compat.stored_value(variable)):
            leaf = Leaf(variable, shard)
            self._leaves.put(variable, leaf)
            self._release(leaf.group)
        return leaf

    def tensor(self, variable: keras.Variable) -> torch.Tensor | None:
        """Returns the tensor of a sharded variable's leaf; None for other variables."""
        shard = shard_of(variable)
        return None if shard is None else self.leaf(variable, shard).tensor

    def read(self, variable: keras.Variable) -> torch.Tensor | None:
        """Returns a sharded variable's value, None if the variable is whole on each worker."""
        shard = shard_of(variable)
        if shard is None:
            return None
        leaf = self.leaf(variable, shard)
        if self.are_differentiated:
            return leaf.tensor
        self._use(leaf.group)
        if keras_compat.is_in_layer():
            return leaf.tensor.view_as(leaf.tensor)
        leaf.group.is_used_itself = True
        return leaf.tensor

    def has_frozen(self, value: object) -> bool:
        """Returns whether an object is the tensor of a gathered weight that is not trained."""
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return False
        leaf = self._by_address.get(value.untyped_storage().data_ptr())
        return leaf is not None and not leaf.tensor.requires_grad

    @contextmanager
    def in_step(self) -> Generator[None]:
        """Lets autograd save references in place of weights; releases the weights at the end."""
        self._place, self._used = (0, None, False), None
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with hooks if self._in_layers else nullcontext():
            try:
                yield
            finally:
                self.release()

    def release(self) -> None:
        """Drops the gathered values of all weights, for example after an update."""
        for group in [*self._gathered]:
            self._release(group)
        self._drop_ahead()
        self._used = None
        self._note(None)
        self.are_differentiated = False

    def _use(self, group: WeightGroup) -> None:
        """Gathers a group, and starts to gather the group that is expected next."""
        if group is self._used:
            return
        self._used = group
        following = self._note(group)
        for other in [*self._gathered]:
            if not (other is group or other.is_used_itself):
                self._release(other)
        self._drop_ahead(but=group)
        if group not in self._gathered:
            self._gather(group)
        if following is not None and following not in self._gathered:
            self._ahead[following] = following.start_gather()

    def _note(self, group: WeightGroup | None) -> WeightGroup | None:
        """Records that a group is used; returns the group that is expected next, or None.

        A `group` of None records that all groups have been released.
        """
        self._following[self._place] = group
        self._place = self._place[0] + 1, group, torch.is_grad_enabled()
        following = self._following.get(self._place)
        return None if following is None or following.is_empty else following

    def _gather(self, group: WeightGroup) -> None:
        work, numbers = self._ahead.pop(group, None) or group.start_gather()
        with metering.waiting_for_workers():
            work.wait()
        leaves: list[Leaf] = []
        for variable, shard, whole in group.full_values(numbers):
            leaf = self.leaf(variable, shard)
            leaf.fill(whole)
            leaves.append(leaf)
            self._by_address[leaf.address] = leaf
        self._gathered[group] = leaves

    def _release(self, group: WeightGroup) -> None:
        leaves = self._gathered.pop(group, None)
        if leaves is None:
            return
        for leaf in leaves:
            del self._by_address[leaf.address]
            leaf.release()
        group.is_used_itself = False
        if self._used is group:
            self._used = None

    def _drop_ahead(self, but: WeightGroup | None = None) -> None:
        """Drops the gather that was started ahead, unless it is a gather of the group `but`."""
        for other in [*self._ahead]:
            if other is not but:
                work, _ = self._ahead.pop(other)
                work.wait()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        if tensor.layout is not torch.strided:
            return tensor
        leaf = self._by_address.get(tensor.untyped_storage().data_ptr())
        if leaf is None:
            return tensor
        return _Saved(
            leaf, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), leaf.version
        )

    def _unpack(self, saved: torch.Tensor | _Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        # Like autograd itself, this function refuses a tensor that was changed after it was saved.
        if saved.version != saved.leaf.version:
            raise RuntimeError(
                "Expected a backward pass before the weights that it needs are updated. Received: "
                f"a changed weight of shape={tuple(saved.leaf.tensor.shape)}. Take the gradients "
                "of both losses first, then apply them."
            )
        self._use(saved.leaf.group)
        whole = saved.leaf.tensor.detach()
        return whole.as_strided(saved.shape, saved.stride, saved.offset)
