"""Optimizers whose state the workers divide: each updates its own parts of the weights.

The workers' gradients of such a weight arrive as this worker's part of their sum. For the time of
the update the optimizer sees parts in the place of weights and slots, so that Keras's own code
updates them. Weights that are whole at rest are then gathered.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, final

import torch

from kerasdist import keras_compat
from kerasdist.agreement.results import unnumbered
from kerasdist.backends.base import metering
from kerasdist.backends.torch.state import shards
from kerasdist.backends.torch.state.gathered import GatheredWeights
from kerasdist.backends.torch.state.shards import Shard, padded
from kerasdist.backends.torch.workers.group import ALL_WHOLE
from kerasdist.core import context, ownership
from kerasdist.core.user_warnings import warn_user

if TYPE_CHECKING:
    from kerasdist.backends.torch.state.shards import Workers
    from kerasdist.backends.torch.workers.process_group import ProcessGroup
    from kerasdist.core.protocols import StrategyLike
    from kerasdist.core.sharding import Sharding
    from kerasdist.job.job import Job

_divisions: weakref.WeakKeyDictionary[Any, DividedState] = weakref.WeakKeyDictionary()


@final
class DividedState:
    """What the workers divide of one optimizer's state, and of the weights that it updates."""

    def __init__(self, optimizer: Any, group: Workers) -> None:
        """Starts without slots."""
        self.group = group
        self._is_elementwise = keras_compat.is_elementwise(optimizer)
        self._slots: list[tuple[Any, Shard]] = []
        self._weights: dict[int, Shard] = {}  # those with divided slots
        # Which gradients of the running update are parts.
        self._are_parts: list[bool] = []

    def add(self, weight: Any, slot: Any) -> None:
        """Divides a slot of a weight."""
        shard = shards.divide(slot, self.group)
        self._slots.append((slot, shard))
        self._weights.setdefault(id(weight), Shard(shard.shape, self.group))

    def updates_part(self, weight: Any) -> Shard | None:
        """Returns how a weight is divided that the optimizer updates in parts, else None."""
        at_rest = shards.shard_of(weight)
        if at_rest is None:
            return self._weights.get(id(weight))
        return at_rest if self._is_elementwise else None

    def of_gradients(self, variables: Sequence[Any]) -> dict[int, Shard]:
        """Returns how the gradients of weights are divided, by their index; whole ones have none.

        The optimizer updates parts of these weights.
        """
        found = {index: self.updates_part(one) for index, one in enumerate(variables)}
        return {index: shard for index, shard in found.items() if shard is not None}

    def parts(
        self, gradients: Sequence[torch.Tensor], variables: Sequence[Any]
    ) -> list[torch.Tensor]:
        """Returns this worker's parts of those gradients that are divided and still whole."""
        divided = self.of_gradients(variables)
        self._are_parts = [index in divided for index in range(len(gradients))]
        return [
            divided[index].part(one)
            if index in divided and one.numel() == divided[index].size
            else one
            for index, one in enumerate(gradients)
        ]

    @contextmanager
    def shown(self, weights: Sequence[Any]) -> Generator[None]:
        """Shows the optimizer this worker's parts of divided weights and slots, in the block.

        Afterwards weights that are whole at rest are gathered.
        """
        gathered: list[tuple[torch.Tensor, Shard]] = []
        with ExitStack() as stack:
            for slot, shard in self._slots:
                stack.enter_context(shards.shown(slot, shard, keras_compat.stored_value(slot)))
            for weight in weights:
                shard, value = self.updates_part(weight), keras_compat.stored_value(weight)
                if shard is None:
                    stack.enter_context(shards.whole([weight]))
                elif shards.shard_of(weight) is not None:
                    stack.enter_context(shards.shown(weight, shard, value))
                else:
                    gathered.append((value.detach(), shard))
                    stack.enter_context(shards.shown(weight, shard, shard.part(value)))
            yield
        self._gather(gathered)

    @torch.no_grad()
    def _gather(self, weights: Sequence[tuple[torch.Tensor, Shard]]) -> None:
        """Fills in the parts of weights that other workers have updated."""
        started = [
            self.group.start_gather_of_parts(padded(shard.part(whole), shard.length))
            for whole, shard in weights
        ]
        for (whole, shard), (work, gathered) in zip(weights, started, strict=True):
            with metering.waiting_for_workers():
                work.wait()
            whole.view(-1).copy_(gathered[: shard.size])

    def squares(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the sum of the squares of each gradient, over all parts."""
        own = torch.stack([one.square().sum() for one in gradients])
        are_parts = torch.tensor(self._are_parts, device=own.device)
        [total] = self.group.sums([torch.where(are_parts, own, 0)])
        return torch.where(are_parts, total, own)


def _state_of(optimizer: Any, weights: Sequence[Any]) -> DividedState | None:
    """Returns what is divided of an optimizer, or of the one that it wraps; None: nothing."""
    if keras_compat.trial() is not None:  # in a trial all state is whole
        return None
    updating = keras_compat.updating(optimizer)
    state = _divisions.get(updating)
    if state is None:
        divided = next(filter(None, map(shards.shard_of, weights)), None)
        if divided is not None:
            state = _divisions[updating] = DividedState(updating, divided.group)
    return state


def of_gradients(optimizer: Any, variables: Sequence[Any]) -> Mapping[int, Shard]:
    """Returns how the gradients that an optimizer applies are divided, by their index."""
    state = _state_of(optimizer, variables)
    return ALL_WHOLE if state is None else state.of_gradients(variables)


@cache
def install() -> None:
    """Changes how Keras's optimizers make slots and use gradients, once per process."""
    shards.install()
    keras_compat.install(
        initialize=_initialize,
        slot=_make_slot,
        update=_update,
        clip=_clip,
        check_finite=_check_finite,
    )


def _initialize(original: Callable[..., None], variable: Any, initializer: Any) -> None:
    """Divides a new weight at once, so that a worker never holds more than one whole."""
    original(variable, initializer)
    strategy = ownership.strategy_of(variable) or context.scoped_strategy()
    rules = _rules_of(strategy)
    if rules is not None and rules.divides_weights and rules.divides(variable):
        rules.divide_weight(variable)


def _rules_of(strategy: StrategyLike | None) -> ShardRules | None:
    replicas: Any = None if strategy is None else strategy.replica_set
    return None if replicas is None else replicas.shard_rules


def _make_slot(
    original: Callable[..., Any],
    optimizer: Any,
    reference_variable: Any,  # Keras's name, by which some optimizers pass it
    *args: Any,
    **kwargs: Any,
) -> Any:
    slot = original(optimizer, reference_variable, *args, **kwargs)
    strategy = ownership.strategy_of(reference_variable)
    rules = _rules_of(strategy)
    if rules is not None and rules.divides_update(optimizer, reference_variable):
        if optimizer not in _divisions:
            _divisions[optimizer] = DividedState(optimizer, rules.group)
        _divisions[optimizer].add(reference_variable, slot)
    return slot


def _update(
    original: Callable[..., None],
    optimizer: Any,
    grads: Sequence[torch.Tensor],
    trainable_variables: Sequence[Any],
) -> None:
    weights = keras_compat.optimized_variables(optimizer)
    state = _state_of(optimizer, weights)
    if state is None:
        original(optimizer, grads, trainable_variables)
        return
    parts = state.parts(grads, trainable_variables)
    with state.shown(weights):
        original(optimizer, parts, trainable_variables)


def _clip(original: Callable[..., Any], optimizer: Any, grads: Sequence[torch.Tensor]) -> Any:
    """Clips by norms over all parts, as Keras does by norms of whole gradients."""
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


def _check_finite(original: Callable[..., Any], optimizer: Any, grads: Collection[Any]) -> Any:
    """Looks for infinite gradients in the parts of all workers."""
    finite = original(optimizer, grads)
    state = _state_of(optimizer, ())
    if state is None:
        return finite
    [missing] = state.group.sums([(~finite).to(torch.int32)])
    return missing == 0


@final
class ShardRules:
    """Which variables of a strategy its workers divide.

    Attributes:
        group: The workers.
        divides_weights: Whether they divide weights too, not the optimizer's slots alone.
        weights: The divided weights, as steps see them.
    """

    def __init__(self, sharding: Sharding, group: ProcessGroup, job: Job) -> None:
        """Takes what the user has asked for."""
        install()
        self.group = group
        self.divides_weights = sharding.state == "full"
        self.weights = GatheredWeights(in_layers=self.divides_weights)
        self._job = job
        self._min_size = sharding.min_size
        self._warned: weakref.WeakSet[Any] = weakref.WeakSet()

    def divides(self, variable: Any) -> bool:
        """Returns whether a variable is a weight that is large enough."""
        stored = keras_compat.stored_value(variable)
        return (
            stored is not None
            and stored.is_floating_point()
            and math.prod(variable.shape) >= self._min_size
            and variable.trainable
            and not variable.overwrite_with_gradient
        )

    def divide_weight(self, variable: Any) -> None:
        """Gives each worker its part of the chief's initial value. All workers must call it."""
        made = f"{unnumbered(variable.path)} {tuple(variable.shape)} {variable.dtype}"
        self._job.assert_equal("divided variables", {"new variable": made})
        stored = keras_compat.stored_value(variable).detach()
        stored.copy_(self.group.from_chief([stored])[0])
        self.weights.add(variable, shards.divide(variable, self.group))

    def divides_update(self, optimizer: Any, weight: Any) -> bool:
        """Returns whether an optimizer updates a weight in parts."""
        if not self.divides(weight):
            return False
        if keras_compat.is_elementwise(optimizer):
            return True
        if optimizer not in self._warned:
            self._warned.add(optimizer)
            kinds = ", ".join(one.__name__ for one in keras_compat.ELEMENTWISE)
            warn_user(
                f"Each worker holds all variables of the optimizer {optimizer.name!r}, in spite of "
                "sharding: on PyTorch an optimizer is divided that updates each element of a "
                f"weight by itself ({kinds}). Received: {type(optimizer).__name__}."
            )
        return False
