"""Computes with weights that are sharded over the workers of one replica, by torch's DTensor.

In a step each weight that is trained or sharded has an autograd leaf of its own: a DTensor over
the replica's workers, which uses the memory of this worker's shard. So whatever is computed with a
weight is a DTensor, and so are all gradients. Other tensors are equal on all workers of the
replica, and DTensor treats them as replicated (`implicit_replication`). A DTensor becomes a plain
tensor, with the full value on each worker, in two cases: a model returns it to the code that
computes losses and metrics, or a step assigns it to a variable.

DTensor has no rule for some operators, and no useful rule for convolutions. So a dispatch mode
intercepts each operator before DTensor does. If DTensor has no rule, each worker computes the
operator from full values, which gives the right result for any operator. When a worker computes
from full values for the first time, a warning names the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast, final

import keras
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor import Shard as Along
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.modules.module import register_module_forward_hook

from kerasdist import keras_compat
from kerasdist.backends.torch import private
from kerasdist.backends.torch.replica.random import chiefs_draws
from kerasdist.backends.torch.state.gathered import ShardedWeights
from kerasdist.backends.torch.state.shards import draw_all, shard_of
from kerasdist.core.context import current
from kerasdist.core.ownership import VariableTable
from kerasdist.core.structures import flatten, map_leaves
from kerasdist.core.user_warnings import warn_once

if TYPE_CHECKING:
    from kerasdist.backends.base.layout_maps import MapReader
    from kerasdist.backends.torch.state.layout_shards import LayoutShard
    from kerasdist.backends.torch.workers.process_group import ProcessGroup

_REPLICATED = Replicate()
_WHOLE = (_REPLICATED,)
_aten = torch.ops.aten


@final
class Leaf:
    """The autograd leaf of one weight. The leaf keeps the gradient until the optimizer's update.

    If the weight is also sharded over the replicas, the leaf's values are gathered at the first
    read in a step, and freed at the end of the step or of an update.
    """

    def __init__(self, stored: torch.Tensor, shard: LayoutShard | None, mesh: Any) -> None:
        """Makes a leaf that shares the memory of `stored`, unless its values must be gathered."""
        self._stored, self._shard = stored, shard
        self._is_gathered = shard is not None and shard.outer is not None
        self._part = stored.detach()
        if shard is not None and self._is_gathered:
            self._part = stored.new_empty(shard.gradient_shape)
        self._bytes = self._part.untyped_storage().nbytes()
        self.placements = _WHOLE
        if shard is not None and shard.inner is not None:
            self.placements = (Along(shard.inner),)
        tensor = _placed(self._part, mesh, *self.placements)
        self.tensor = tensor.detach().requires_grad_(stored.requires_grad)
        self._is_filled = not self._is_gathered
        self.release()

    def serves(self, stored: torch.Tensor) -> bool:
        """Returns whether this leaf was made for `stored`, the tensor that the variable has now."""
        return stored is self._stored and stored.requires_grad == self.tensor.requires_grad

    @torch.no_grad()
    def fill(self) -> None:
        """Gathers the weight over the replicas, if it is sharded over them."""
        if self._is_filled or self._shard is None:
            return
        self._part.untyped_storage().resize_(self._bytes)
        self._part.copy_(self._shard.gather_across(self._stored.detach()))
        self._is_filled = True

    def release(self) -> None:
        """Frees the weight's values, if they were gathered over the replicas."""
        if self._is_gathered:
            self._part.untyped_storage().resize_(0)
            self._is_filled = False


@final
class LayoutWeights(ShardedWeights):
    """The weights of a strategy with a LayoutMap; converts tensors to DTensors and back."""

    advice = "Leave it out of the LayoutMap, so that it is whole on each worker."

    def __init__(self, row: ProcessGroup, reader: MapReader, inside: str) -> None:
        """Starts without weights.

        `row` has the workers of this worker's replica; `inside` is the name of their mesh axis.
        """
        self._row, self._reader, self._inside = row, reader, inside
        self._mesh = row.mesh()
        self._leaves: VariableTable[Leaf] = VariableTable()

    def tensor(self, variable: keras.Variable) -> torch.Tensor | None:
        """Returns a weight's leaf, whether or not it has values now; None for other variables."""
        leaf = self._leaf(variable)
        return None if leaf is None else leaf.tensor

    def read(self, variable: keras.Variable) -> torch.Tensor | None:
        """Returns a weight as a DTensor; None for a variable that is read as it is stored."""
        leaf = self._leaf(variable)
        if leaf is None:
            return None
        leaf.fill()
        return leaf.tensor

    def _leaf(self, variable: keras.Variable) -> Leaf | None:
        stored = keras_compat.stored_value(variable)
        shard = cast("LayoutShard | None", shard_of(variable))
        if stored is None or (shard is None and not stored.requires_grad):
            return None
        leaf = self._leaves.get(variable)
        if leaf is None or not leaf.serves(stored):
            leaf = Leaf(stored, shard, self._mesh)
            self._leaves.put(variable, leaf)
        return leaf

    @contextmanager
    def in_step(self) -> Generator[None]:
        """Lets the block compute with DTensors; a replica's workers draw equal random numbers."""
        draw_all()
        self._reader.require_useful()
        hook = register_module_forward_hook(self._lay_out_output)
        with chiefs_draws(self._row, self._row.device), private.intercept(self._run, DTensor):
            try:
                yield
            finally:
                hook.remove()
                self.release()
        # Only after a step are the paths of the layers' outputs known. So now the map's keys are
        # compared with these paths, too.
        self._reader.require_useful()

    def _lay_out_output(self, layer: torch.nn.Module, _: object, outputs: object) -> Any:
        """Returns the output of a layer as the map lays it out; None to leave it as it is."""
        # Layers may also run outside of replicas, for example in threads that read data ahead.
        if not isinstance(layer, keras.Layer) or current.replica is None:
            return None
        path = f"{keras_compat.path_of_call()}/output"
        axes = self._reader.output_axes(path)
        if axes is None:
            return None
        return map_leaves(lambda leaf: self._lay_out(leaf, path, axes), outputs)

    def _lay_out(self, leaf: object, path: str, axes: Sequence[str | None]) -> object:
        """Returns an output, sharded over a replica's workers if its layout says so."""
        if not isinstance(leaf, torch.Tensor) or leaf.is_meta:
            return leaf
        if leaf.ndim < len(axes):
            raise ValueError(
                "Expected an output with as many axes as its layout in the LayoutMap, or more. "
                f"Received: layout={tuple(axes)} for {path!r} of shape={tuple(leaf.shape)}. "
                "Change the LayoutMap."
            )
        axis = axes.index(self._inside) if self._inside in axes else None
        if axis is not None and leaf.shape[axis] % self._mesh.size():
            axis = None  # some of DTensor's rules need blocks of equal size
            warn_once(
                self,
                "Expected the workers of a replica to divide the output of a layer evenly, so "
                f"each worker has it whole. Received: layout={tuple(axes)} for {path!r} of "
                f"shape={tuple(leaf.shape)}, over {self._mesh.size()} workers.",
                path,
            )
        place = _REPLICATED if axis is None else Along(axis)
        joined = leaf if isinstance(leaf, DTensor) else _placed(leaf, self._mesh)
        return keras_compat.keep_keras_mask(leaf, joined.redistribute(placements=(place,)))

    def release(self) -> None:
        """Frees the weights that were gathered over the replicas."""
        for variable in self._leaves.variables():
            leaf = self._leaves.get(variable)
            if leaf is not None:
                leaf.release()

    def plain(self, structure: Any) -> Any:
        """Returns a structure in which a plain tensor, the full value, replaces each DTensor."""
        return map_leaves(_plain, structure)

    def joint(self, structure: Any) -> Any:
        """Returns a structure in which DTensors replace plain tensors that require gradients."""

        def joined(leaf: Any) -> Any:
            is_plain = isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor)
            if not is_plain or not leaf.requires_grad:
                return leaf
            return _placed(leaf, self._mesh)

        return map_leaves(joined, structure)

    def equalize(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns, on all workers of the replica, the tensors of the replica's first worker."""
        return self._row.from_chief(tensors)

    @torch.no_grad()
    def own_gradient(self, gradient: torch.Tensor, variable: keras.Variable) -> torch.Tensor:
        """Returns this worker's part of a weight's gradient, before the sum over the replicas."""
        shard = cast("LayoutShard | None", shard_of(variable))
        if isinstance(gradient, DTensor):
            leaf = self._leaf(variable)
            [placement] = _WHOLE if leaf is None else leaf.placements
            return _local(gradient.detach(), self._mesh, placement)
        return gradient if shard is None else shard.part_of(gradient)

    def _run(self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs an operation on DTensors: by `_RULES`, by DTensor's rules, or on full values."""
        own = _RULES.get(operation)
        result = None if own is None else own(self._mesh, *args)
        if result is not None:
            return result
        if operation not in _WRONG and torch.Tag.nondeterministic_seeded not in operation.tags:
            try:
                # `implicit_replication` is entered for each operator, because the thread that runs
                # the backward pass on a GPU does not inherit it.
                with implicit_replication():
                    return _summed(operation(*args, **kwargs))
            except (NotImplementedError, RuntimeError) as error:
                if not _has_no_rule(error):
                    raise
        warn_once(
            self,
            f"torch's DTensor has no rule for {operation}, so each worker of a replica computes "
            "it from whole values: the numbers are the same, and this operator takes the memory "
            "and time of one device. Received: a LayoutMap that divides the operator's inputs.",
        )
        return self._run_whole(operation, args, kwargs)

    def _run_whole(self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs an operator on full values, in the same way on each worker of a replica."""
        wholes: dict[int, torch.Tensor] = {}

        def whole(leaf: Any) -> Any:
            if not isinstance(leaf, DTensor):
                return leaf
            if id(leaf) not in wholes:
                wholes[id(leaf)] = _local(leaf, self._mesh, _REPLICATED)
            return wholes[id(leaf)]

        with torch.no_grad():
            result = operation(*map_leaves(whole, list(args)), **map_leaves(whole, dict(kwargs)))
            changed: dict[int, DTensor] = {}
            for place, name in private.list_written(operation):
                given = args[place] if place < len(args) else kwargs.get(name)
                for leaf in flatten(given):
                    if isinstance(leaf, DTensor):
                        changed[id(whole(leaf))] = leaf
                        [placement] = leaf.placements
                        leaf.to_local().copy_(_local(whole(leaf), self._mesh, placement))

        def wrapped(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) in changed:
                return changed[id(leaf)]
            return _placed(leaf, self._mesh)

        return map_leaves(wrapped, result)


def _summed(result: Any) -> Any:
    """Adds up partial sums in a result now, so that each later use need not add them again."""
    if isinstance(result, DTensor) and result.placements[0].is_partial():
        return result.redistribute(placements=_WHOLE)
    return result


def _has_no_rule(error: Exception) -> bool:
    return isinstance(error, NotImplementedError) or "Sharding propagation failed" in str(error)


def _plain(leaf: Any) -> Any:
    if not isinstance(leaf, DTensor):
        return leaf
    return keras_compat.keep_keras_mask(leaf, _ToPlain.apply(leaf), _plain)


class _ToPlain(torch.autograd.Function):
    """Converts a DTensor to its full value, whose gradients are equal on a replica's workers."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> torch.Tensor:
        """Returns the full value, as a plain tensor."""
        ctx.mesh = tensor.device_mesh
        local = tensor.redistribute(placements=_WHOLE).to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Returns the gradient as a DTensor, which it may be already."""
        [gradient] = gradients
        if isinstance(gradient, DTensor):
            return gradient
        return _placed(gradient, ctx.mesh)


def _placed(local: torch.Tensor, mesh: Any, placement: Any = _REPLICATED) -> DTensor:
    """Makes a DTensor of the workers' local tensors; without `placement`, these must be equal."""
    return DTensor.from_local(local, mesh, (placement,), run_check=False)


def _local(tensor: Any, mesh: Any, placement: Any) -> Any:
    """Converts a tensor to a DTensor with this placement; returns this worker's local tensor."""
    if tensor is None:
        return None
    if not isinstance(tensor, DTensor):
        tensor = _placed(tensor, mesh)
    return tensor.redistribute(placements=(placement,)).to_local()


def _embedding_gradient(  # noqa: PLR0917  torch's parameters
    mesh: Any, gradient: Any, indices: Any, rows: int, padding: int, by_frequency: bool
) -> Any:
    """Computes the gradient of this worker's rows of an embedding; returns None if it cannot."""
    own = rows // mesh.size()
    if own * mesh.size() != rows or by_frequency or gradient.placements[0].is_shard():
        return None
    whole, numbers = _local(gradient, mesh, _REPLICATED), _local(indices, mesh, _REPLICATED)
    begin = mesh.get_local_rank() * own
    # An additional last row takes the gradients of padding and of other workers' rows. The
    # slice ``[:own]`` drops it again.
    is_own = (numbers >= begin) & (numbers < begin + own) & (numbers != padding)
    numbers = torch.where(is_own, numbers - begin, own)
    found = _aten.embedding_dense_backward.default(whole, numbers, own + 1, -1, False)[:own]
    return _placed(found, mesh, Along(0))


def _is_by_channels(weight: Any, settings: Sequence[Any]) -> bool:
    """Returns whether an ordinary convolution, without groups, is sharded by output channels."""
    *_, transposed, _, groups = settings
    is_by_outputs = isinstance(weight, DTensor) and weight.placements == (Along(0),)
    return is_by_outputs and not transposed and groups == 1


def _convolve(mesh: Any, inputs: Any, weight: Any, bias: Any, *settings: Any) -> Any:
    """Computes this worker's output channels; returns None if `_is_by_channels` returns False."""
    if not _is_by_channels(weight, settings):
        return None
    own = _aten.convolution.default(
        _local(inputs, mesh, _REPLICATED),
        weight.to_local(),
        _local(bias, mesh, Along(0)),
        *settings,
    )
    return _placed(own, mesh, Along(1))


def _convolve_backward(
    mesh: Any, gradient: Any, inputs: Any, weight: Any, bias_sizes: Any, *settings: Any
) -> Any:
    """Computes the gradients of `_convolve`; the last setting says which gradients are needed."""
    if not _is_by_channels(weight, settings[:-1]):
        return None
    own = weight.to_local()
    found = _aten.convolution_backward.default(
        _local(gradient, mesh, Along(1)),
        _local(inputs, mesh, _REPLICATED),
        own,
        None if bias_sizes is None else [len(own)],
        *settings,
    )
    pairs = zip(found, (Partial(), Along(0), Along(0)), strict=True)
    return tuple(None if one is None else _placed(one, mesh, place) for one, place in pairs)


_RULES: dict[Any, Callable[..., Any]] = {
    _aten.convolution.default: _convolve,
    _aten.convolution_backward.default: _convolve_backward,
    _aten.embedding_dense_backward.default: _embedding_gradient,
}
# The operators for which DTensor's own rules are not used, because these rules support sharded
# inputs, but not sharded kernels.
_WRONG = {_aten.convolution.default, _aten.convolution_backward.default}
