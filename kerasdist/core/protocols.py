"""What the layers below `kerasdist.api` know of a strategy and of a replica's context.

The classes are in `kerasdist.api.strategy` and `kerasdist.api.replica_context`, which import those
layers; without these protocols the types would go in a circle.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol


class StrategyLike(Protocol):
    """A `kerasdist.Strategy`, by what it can be asked."""

    is_used: bool

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas gradients are combined over."""
        ...

    @property
    def local_replicas(self) -> range:
        """The numbers of the replicas in this process."""
        ...

    @property
    def is_chief(self) -> bool:
        """Whether this process is the chief."""
        ...

    @property
    def replica_set(self) -> Any:
        """The `ReplicaSet`; None for the default strategy."""
        ...

    @property
    def options(self) -> Any:
        """The `ReplicaOptions`."""
        ...

    @property
    def runner(self) -> Any:
        """The `Runner`."""
        ...

    def scope(self) -> AbstractContextManager[Any]:
        """Opens the strategy's scope."""
        ...

    @property
    def sole_replica_context(self) -> Any:
        """The `ReplicaContext` of code outside of every replica."""
        ...


class ReplicaLike(Protocol):
    """A `kerasdist.ReplicaContext`, by what it can be asked."""

    @property
    def strategy(self) -> StrategyLike:
        """The strategy that runs the step."""
        ...

    @property
    def replica_id_in_sync_group(self) -> Any:
        """This replica's number."""
        ...

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas take part."""
        ...

    @property
    def collectives(self) -> Any:
        """The replica's `Collectives`."""
        ...

    @property
    def local_batch(self) -> Any:
        """Its `LocalBatch` in a step of `fit`, else None."""
        ...

    @property
    def weight(self) -> Any:
        """Its weight among the examples in a step of `fit`."""
        ...

    @property
    def layer_losses(self) -> dict[int, tuple[Any, list[Any]]]:
        """Losses that layers added in this replica."""
        ...
