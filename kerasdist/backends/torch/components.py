"""Variables in custom loops (contract C2): what replicas hold together, and what each for itself.

A variable that names an aggregation is equal on all replicas: assigning to it in replica code meets
the others, and all see the sum, the mean or the first replica's value at once. The others have a
component on every replica, which lives on from run to run:

- ``synchronization="on_read"``, as the state of Keras's metrics: the variable's own value is the
  components' aggregate.
- no aggregation, as the state of a seed generator, or moving statistics: the variable's own value
  is the first replica's. So it is with ``tf.distribute``.

When cross-replica code assigns to such a variable, every component is made anew from the value, an
equal share of it for a sum.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from kerasdist import context, keras_seam, ownership
from kerasdist.backends.torch.variables import ReplicaScope, Rules, is_sum


@final
@dataclass(frozen=True, eq=False)
class Kept:
    """The components of one variable, and the variable's own value that goes with them.

    Attributes:
        values: One a replica.
        own: Where the variable keeps its own value.
        address: Where that was in memory.
        version: How often it had been changed.
        variable: The variable; its end is the end of this, too.
    """

    values: tuple[torch.Tensor, ...]
    own: torch.Tensor
    address: int
    version: int
    variable: weakref.ref[Any]

    def serves(self, own: torch.Tensor) -> bool:
        """Returns whether the variable's own value is still the one that goes with these.

        Args:
            own: Where the variable keeps its own value now.
        """
        return (
            own is self.own
            and own.data_ptr() == self.address
            and own._version == self.version  # any change in place counts it up
        )


@final
class Components:
    """The components of all variables that one strategy's replicas hold each for itself."""

    def __init__(self, replicas: int) -> None:
        """Starts with none.

        Args:
            replicas: How many replicas there are.
        """
        self.replicas = replicas
        self._kept: dict[int, Kept] = {}

    def component(
        self, variable: Any, rank: int, device: torch.device | None = None
    ) -> torch.Tensor | None:
        """Returns what a replica holds of a variable, None where that is the variable's own value.

        Args:
            variable: A Keras variable that has a value.
            rank: The replica's number.
            device: Where to put it.
        """
        own = keras_seam.stored_value(variable)
        kept = self._kept.get(id(variable))
        if kept is not None and kept.serves(own):
            return kept.values[rank]
        if not is_on_read(variable):
            return None
        with torch.no_grad():
            part = equal_share(own, rank, self.replicas) if is_sum(variable) else own
            part = part.detach().to(device or own.device, copy=True)
        return part.requires_grad_(own.requires_grad)

    def keep(self, variable: Any, values: Sequence[torch.Tensor]) -> None:
        """Keeps the replicas' components, and makes the variable's own value their aggregate.

        Args:
            variable: A Keras variable that is not equal on all replicas.
            values: One a replica.
        """
        own = keras_seam.stored_value(variable)
        with torch.no_grad():
            # A variable without aggregation is the first replica's.
            together = aggregated(variable, values) if is_on_read(variable) else values[0]
            own.copy_(together)
        key = id(variable)
        forget = weakref.ref(variable, lambda _: self._kept.pop(key, None))
        self._kept[key] = Kept(tuple(values), own, own.data_ptr(), own._version, forget)


@final
class LoopRules(Rules):
    """What replicas read and write in the functions that `Strategy.run` calls."""

    def __init__(self, components: Components, initialize: Callable[[Any], None]) -> None:
        """Makes the rules of one strategy's replicas.

        Args:
            components: What the replicas hold each for itself.
            initialize: Gives a value to a variable that has none yet.
        """
        self._components = components
        self._initialize = initialize

    def own_value(
        self, scope: ReplicaScope, variable: Any, source: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Returns the replica's component.

        Args:
            scope: The replica's scope.
            variable: A Keras variable.
            source: Where it keeps its value; None for one that a symbolic call has just made.
        """
        if source is None:
            self._initialize(variable)
        return self._components.component(variable, scope.rank, scope.device)

    def assign_together(self, scope: ReplicaScope, variable: Any, value: torch.Tensor) -> bool:
        """Combines the replicas' values by the variable's aggregation, at once.

        Args:
            scope: The replica's scope.
            variable: A Keras variable.
            value: This replica's value.

        Raises:
            ValueError: For a mean of numbers that are not floats.
        """
        ownership.require_own(variable)
        if is_on_read(variable) or variable.aggregation == "none":
            return False
        require_floats_for_mean(variable, value)
        context.replica().collectives.assign_together(variable, value)  # type: ignore[union-attr]
        scope.settle(())
        return True

    def commit(self, scopes: Sequence[ReplicaScope], *, sums: bool) -> list[int]:
        """Writes the aggregates of what the replicas hold each for itself into the variables.

        Args:
            scopes: The replicas' scopes, in the order of ranks.
            sums: Whether to write those too that are aggregated when they are read.
        """
        written: dict[int, Any] = {}
        for scope in scopes:
            written.update(scope.written)
        if not sums:
            written = {key: one for key, one in written.items() if not is_on_read(one)}
        for key, variable in written.items():
            self._components.keep(variable, [self._held(s, key, variable) for s in scopes])
        return list(written)

    def _held(self, scope: ReplicaScope, key: int, variable: Any) -> torch.Tensor:
        if key in scope.written:
            return scope.state_mapping[key]
        held = self._components.component(variable, scope.rank, scope.device)
        if held is not None:
            return held
        own = keras_seam.stored_value(variable)
        return own.detach().to(scope.device, copy=True).requires_grad_(own.requires_grad)


def is_on_read(variable: Any) -> bool:
    """Returns whether a variable is aggregated when cross-replica code reads it.

    Args:
        variable: A Keras variable.
    """
    return variable.synchronization == "on_read"


def require_aggregate(variable: Any) -> None:
    """Refuses to read a variable outside of replicas that has a component on each and no aggregate.

    Args:
        variable: A Keras variable.

    Raises:
        ValueError: If it is one.
    """
    if is_on_read(variable) and variable.aggregation == "none":
        raise ValueError(
            "Expected a variable with an aggregation, as its replicas' components are aggregated "
            f"when it is read. Received: variable={variable.path!r}, synchronization='on_read', "
            "aggregation='none'. Read its components, with strategy.local_results(variable), or "
            "make it with an aggregation."
        )


def require_floats_for_mean(variable: Any, value: torch.Tensor) -> None:
    """Refuses an assignment in replica code whose mean over the replicas cannot be stored.

    Args:
        variable: A Keras variable.
        value: What is assigned to it.

    Raises:
        ValueError: If its aggregation is the mean, of numbers that are not floats.
    """
    if variable.aggregation == "mean" and not value.is_floating_point():
        raise ValueError(
            "Expected a variable of floats to be assigned to in replica code, as its "
            f"aggregation is the mean. Received: variable={variable.path!r}, "
            f"dtype={variable.dtype}. Make it a variable of floats, or assign to it in "
            "cross-replica context (see ReplicaContext.merge_call)."
        )


def aggregated(variable: Any, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the replicas' values combined by a variable's aggregation.

    Args:
        variable: The Keras variable.
        values: One a replica.
    """
    first = values[0]
    if variable.aggregation not in ("sum", "mean"):
        return first
    total = first
    for value in values[1:]:
        total = total + value.to(first.device)
    return total if is_sum(variable) else (total / len(values)).to(first.dtype)


def equal_share(total: torch.Tensor, rank: int, replicas: int) -> torch.Tensor:
    """Returns a replica's equal share of a sum; of integers the first gets the rest, too.

    Args:
        total: The sum.
        rank: The replica's number.
        replicas: How many replicas there are.
    """
    if total.is_floating_point() or total.is_complex():
        return total / replicas
    share = torch.div(total, replicas, rounding_mode="trunc")
    return total - share * (replicas - 1) if rank == 0 else share
