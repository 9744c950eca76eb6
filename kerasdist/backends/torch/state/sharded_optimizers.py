"""Optimizers whose state is sharded over the workers: each worker updates its shards of weights.

Of a weight's gradient, which is summed over the workers, each worker gets its own shard. During the
update the optimizer sees shards in place of weights and slots (the optimizer's own variables, such
as momentums), so Keras's own code updates the shards. If each worker stores a weight whole, the
workers then exchange the updated shards of this weight.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, final

import keras
import torch

from kerasdist import keras_compat
from kerasdist.agreement.results import unnumbered
from kerasdist.backends.base.checks import count_hosts
from kerasdist.backends.torch.state import host_memory, shards
from kerasdist.backends.torch.state.gathered import GatheredWeights, ShardedWeights
from kerasdist.backends.torch.state.shards import Shard
from kerasdist.core import ownership
from kerasdist.core.context import current, scoped_strategy
from kerasdist.core.internals import require_all
from kerasdist.core.ownership import VariableTable
from kerasdist.core.sharding import is_small
from kerasdist.core.user_warnings import warn_once
from kerasdist.keras_compat import LossScaleOptimizer

if TYPE_CHECKING:
    from kerasdist.backends.torch.workers.process_group import ProcessGroup
    from kerasdist.core.context import StrategyLike
    from kerasdist.core.sharding import Sharding
    from kerasdist.job.job import Job

_sharded: weakref.WeakKeyDictionary[keras.optimizers.Optimizer, ShardedOptimizer] = (
    weakref.WeakKeyDictionary()
)


# The layers with sharded weights, and their strategies. A weight that such a layer makes later, as
# when the layer is quantized, is sharded too.
_sharded_layers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class ShardedOptimizer:
    """Knows which of an optimizer's variables are sharded, and which weights' updates are."""

    def __init__(self, optimizer: keras.optimizers.Optimizer, group: ProcessGroup) -> None:
        """Starts without slots. The workers of `group` will divide the slots among themselves."""
        self.group = group
        self._is_elementwise = keras_compat.is_elementwise(optimizer)
        self._slots: list[keras.Variable] = []
        self._weights: VariableTable[Shard] = VariableTable()  # the weights whose slots are sharded
        # For each group of workers: whether each gradient of the running update is divided over the
        # workers of the group.
        self._divided: list[tuple[ProcessGroup, list[bool]]] = []

    def add(self, weight: keras.Variable, slot: keras.Variable, shard: Shard) -> None:
        """Shards a slot, an optimizer's variable for one weight."""
        shards.keep_shard(slot, shard)
        self._slots.append(slot)
        self._weights.put(weight, shard)

    def updated(self, weight: keras.Variable) -> Shard | None:
        """Returns the shard of a weight that this worker updates.

        Returns None if this worker updates the whole weight.
        """
        held = shards.shard_of(weight)
        if held is None:
            return self._weights.get(weight)
        return held if self._is_elementwise else None

    def of_gradients(self, variables: Sequence[keras.Variable]) -> dict[int, Shard]:
        """Returns the `Shard` of each gradient that is sharded, by the gradient's index."""
        found = {index: self.updated(one) for index, one in enumerate(variables)}
        return {index: shard for index, shard in found.items() if shard is not None}

    def cut(
        self, gradients: Sequence[torch.Tensor], variables: Sequence[keras.Variable]
    ) -> list[torch.Tensor]:
        """Returns the gradients; cuts each one whose update is sharded to this worker's shard."""
        held = self.of_gradients(variables)
        self._divided = [(self.group, [index in held for index in range(len(gradients))])]
        return [
            held[index].cut(one) if index in held and one.numel() == held[index].size else one
            for index, one in enumerate(gradients)
        ]

    @contextmanager
    def updating(self, weights: Sequence[keras.Variable]) -> Generator[None]:
        """Lets the optimizer see shards of weights and slots while the block runs.

        A worker may store a weight whole, and yet update only a shard of the weight. After the
        block, such a weight gets the updated shards of all workers.
        """
        shards.draw_all()
        seen = [(slot, keras_compat.stored_value(slot)) for slot in self._slots]
        whole: list[keras.Variable] = []
        updated: list[tuple[torch.Tensor, Shard, torch.Tensor]] = []
        for weight in weights:
            shard, value = self.updated(weight), keras_compat.stored_value(weight)
            if shard is None:
                whole.append(weight)
            elif shards.shard_of(weight) is not None:
                seen.append((weight, value))
            else:
                own = shard.cut(value)  # a view of `value`; a copy if it is not contiguous
                updated.append((value.detach(), shard, own))
                seen.append((weight, own))
        with shards.held_whole(whole), shards.stored_as(seen):
            yield
        with torch.no_grad():
            for value, shard, own in updated:
                value.copy_(shard.gather(own))

    def squares(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns, for each gradient, the sum of its elements' squares over all workers' shards."""
        found = torch.stack([one.square().sum() for one in gradients])
        for group, divided in self._divided:
            is_divided = torch.tensor(divided, device=found.device)
            [total] = group.sums([torch.where(is_divided, found, 0)])
            found = torch.where(is_divided, total, found)
        return found


def _state_of(
    optimizer: keras.optimizers.Optimizer, weights: Sequence[keras.Variable]
) -> ShardedOptimizer | None:
    """Returns the `ShardedOptimizer` of an optimizer.

    Returns None if neither the optimizer's variables nor its weights are sharded. A
    LossScaleOptimizer has the `ShardedOptimizer` of its inner optimizer.
    """
    if current.trial is not None:  # in a trial, no state is sharded
        return None
    updating = keras_compat.updating(optimizer)
    state = _sharded.get(updating)
    if state is None:
        held = next((one for one in weights if shards.shard_of(one) is not None), None)
        rules = None if held is None else _rules_of(ownership.strategy_of(held))
        if rules is not None:
            state = _sharded[updating] = rules.new_state(updating)
    return state


def of_gradients(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
) -> Mapping[int, Shard]:
    """Returns the `Shard` of each sharded gradient that an optimizer applies, by index."""
    state = _state_of(optimizer, variables)
    return {} if state is None else state.of_gradients(variables)


@cache
def install() -> None:
    """Installs hooks where Keras makes variables and uses gradients, once per process."""
    shards.install()
    keras_compat.install(initialize=_initialize, slot=_make_slot, update=_update, clip=_clip)


def _initialize(
    original: Callable[..., None], variable: keras.Variable, initializer: object
) -> None:
    """Shards a weight when it is made, so that a worker never holds more than one full weight."""
    maker = keras_compat.maker_of_variable()
    strategy = ownership.strategy_of(variable) or scoped_strategy()
    if strategy is None and isinstance(maker, keras.Layer):
        strategy = _sharded_layers.get(maker)
    rules = _rules_of(strategy)
    if rules is not None and rules.shards_weights and rules.serves(variable):
        assert strategy is not None  # because `rules` belong to a strategy
        ownership.record_owner(variable, strategy)
        rules.shard_weight(variable, initializer)
        if isinstance(maker, keras.Layer):
            _sharded_layers[maker] = strategy
    else:
        original(variable, initializer)


def _rules_of(strategy: StrategyLike | None) -> ShardRules | None:
    replicas: Any = None if strategy is None else strategy.replica_set
    return None if replicas is None else replicas.shard_rules


def _make_slot(
    original: Callable[..., Any],
    optimizer: keras.optimizers.Optimizer,
    reference_variable: keras.Variable,  # some optimizers pass it by this name
    *args: object,
    **kwargs: object,
) -> Any:
    slot = original(optimizer, reference_variable, *args, **kwargs)
    strategy = ownership.strategy_of(reference_variable)
    rules = _rules_of(strategy)
    if rules is not None:
        ownership.record_slot(slot, reference_variable)
        if rules.shards_update(optimizer, reference_variable):
            if optimizer not in _sharded:
                _sharded[optimizer] = rules.new_state(optimizer)
            shard = rules.new_shard(reference_variable)
            _sharded[optimizer].add(reference_variable, slot, shard)
    options = None if strategy is None else strategy.options
    if options is not None and options.offload and not is_small(options.sharding, slot.shape):
        host_memory.move(optimizer, reference_variable, slot)
    return slot


def _update(
    original: Callable[..., None],
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[torch.Tensor],
    trainable_variables: Sequence[keras.Variable],
) -> None:
    weights = keras_compat.optimized_variables(optimizer)
    state = _state_of(optimizer, weights)
    if state is None:
        original(optimizer, grads, trainable_variables)
        return
    if optimizer.clipnorm or optimizer.global_clipnorm:
        keras_compat.internals.CLIP_GRADIENTS.require()
    cut = state.cut(grads, trainable_variables)
    with state.updating(weights):
        original(optimizer, cut, trainable_variables)


def _clip(
    original: Callable[..., Any],
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[torch.Tensor],
) -> Any:
    """Clips gradients by norms over all workers' shards, that is, by whole gradients' norms."""
    state = _state_of(optimizer, ())
    if state is None or not grads:
        return original(optimizer, grads)
    if optimizer.clipnorm and optimizer.clipnorm > 0:
        norms = state.squares(grads).sqrt().unbind()
        limit = optimizer.clipnorm
        return [one * limit / norm.clamp(min=limit) for one, norm in zip(grads, norms, strict=True)]
    if optimizer.global_clipnorm and optimizer.global_clipnorm > 0:
        norm, limit = state.squares(grads).sum().sqrt(), optimizer.global_clipnorm
        # As in Keras, a norm that is not finite makes all gradients NaN.
        scale = limit * torch.minimum(1.0 / norm, norm.new_tensor(1.0 / limit)) + (norm - norm)
        return [one * scale for one in grads]
    return original(optimizer, grads)


def spread_infinite(
    optimizer: keras.Optimizer, gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Lets a LossScaleOptimizer notice infinite gradients in the shards of other workers, too.

    All workers must call this function. If any worker has a gradient that is not finite, each
    worker gets a gradient of NaN.
    """
    found = list(gradients)
    state = _state_of(optimizer, ())
    index = next((i for i, one in enumerate(found) if one is not None), None)
    if state is None or index is None or not isinstance(optimizer, LossScaleOptimizer):
        return found
    finite = optimizer.check_finite(found)
    [missing] = state.group.sums([(~finite).to(torch.int32)])
    first: Any = found[index]
    found[index] = torch.where(missing > 0, torch.full_like(first, torch.nan), first)
    return found


class ShardRules(abc.ABC):
    """Decides which variables of a strategy are sharded, and how.

    Attributes:
        shards_weights: Whether weights are sharded too, and not only the optimizer's variables.
        weights: The object from which a replica's steps get the values of sharded weights.
    """

    shards_weights = True
    weights: ShardedWeights

    def __init__(self, workers: ProcessGroup, job: Job) -> None:
        """Installs the hooks into Keras; stores the job and its workers."""
        require_all(keras_compat.internals, keras_compat.internals.SHARDING)
        keras_compat.internals.NAME_SCOPES.require()
        install()
        self._workers = workers
        self._job = job

    @abc.abstractmethod
    def new_state(self, optimizer: keras.optimizers.Optimizer) -> ShardedOptimizer:
        """Returns a new sharded state for an optimizer."""

    @abc.abstractmethod
    def new_shard(self, variable: keras.Variable) -> Shard:
        """Returns a new shard of a variable that these rules shard."""

    @abc.abstractmethod
    def serves(self, variable: keras.Variable) -> bool:
        """Returns whether a variable is a weight that these rules shard."""

    @abc.abstractmethod
    def why_whole(self, variable: keras.Variable) -> str:
        """Returns why a variable is not sharded, in words for the table of `describe_layout`."""

    def shard_weight(self, variable: keras.Variable, initializer: Any) -> None:
        """Gives each worker its shard of a new weight. All workers must call this method."""
        made = f"{unnumbered(variable.path)} {tuple(variable.shape)} {variable.dtype}"
        self._job.assert_equal("sharded variables", {"new variable": made})
        shard = self.new_shard(variable)
        shards.shard_without_values(variable, initializer, shard, self._workers)
        # The values may be drawn later only if a later draw gives the same values as a draw now.
        # This is true for Keras's own initializers whose seed, if they have one, is a number.
        is_fixed = isinstance(getattr(initializer, "seed", 0), int)
        if not (is_fixed and keras_compat.is_builtin(type(initializer))):
            shards.draw_one(variable, shard, self._workers)
        self.weights.add(variable, shard)

    def shards_update(self, optimizer: keras.optimizers.Optimizer, weight: keras.Variable) -> bool:
        """Returns whether an optimizer updates only this worker's shard of a weight."""
        if not self.serves(weight):
            return False
        if keras_compat.is_elementwise(optimizer):
            return True
        kinds = ", ".join(one.__name__ for one in keras_compat.ELEMENTWISE)
        warn_once(
            optimizer,
            f"Each worker holds all variables of the optimizer {optimizer.name!r}, in spite of "
            "sharding: on PyTorch only an optimizer that updates each element of a weight by "
            f"itself ({kinds}) is sharded. Received: {type(optimizer).__name__}.",
        )
        return False


@final
class RulesBySize(ShardRules):
    """The rules of a `Sharding`: each shard is a range of a large variable's flattened values.

    Attributes:
        group: The workers over which variables are sharded: all workers, or those of one machine.
    """

    def __init__(self, sharding: Sharding, workers: ProcessGroup, job: Job) -> None:
        """Stores the user's `Sharding`. All workers of the job must make this object."""
        super().__init__(workers, job)
        hosts = count_hosts(sharding, job, workers.size)
        self.group = workers if hosts == 1 else workers.within_host(workers.size // hosts)
        self.shards_weights = sharding.divides_weights
        self.weights = GatheredWeights(in_layers=self.shards_weights)
        self._sharding = sharding

    def new_state(self, optimizer: keras.optimizers.Optimizer) -> ShardedOptimizer:
        """Returns a new sharded state for an optimizer."""
        return ShardedOptimizer(optimizer, self.group)

    def new_shard(self, variable: keras.Variable) -> Shard:
        """Returns a new shard of a variable."""
        return Shard(tuple(variable.shape), self.group)

    def serves(self, variable: keras.Variable) -> bool:
        """Returns whether a variable is a large weight that is trained or quantized."""
        if self._sharding.is_small(variable.shape) or variable.overwrite_with_gradient:
            return False
        dtype = keras_compat.stored_dtype(variable)
        # Of the variables that are not trained, only quantized weights and their scales are
        # sharded. The others are whole on each worker, because a step may assign to them.
        is_weight = variable.trainable or variable.name.endswith("_scale")
        is_quantized = dtype == "int8" or (dtype == "uint8" and variable.name.startswith("kernel"))
        return is_quantized or (keras.backend.is_float_dtype(dtype) and is_weight)

    def why_whole(self, variable: keras.Variable) -> str:
        """Returns why a variable is not sharded, in words for the table of `describe_layout`."""
        if self._sharding.is_small(variable.shape):
            return self._sharding.small
        if self.serves(variable):
            return "not the optimizer's"
        return "not trained, or its optimizer mixes elements"
