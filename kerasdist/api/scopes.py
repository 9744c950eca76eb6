"""Which strategy is in force, and whose code runs, by the names of ``tf.distribute``."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from kerasdist.core import context

if TYPE_CHECKING:
    from kerasdist.api.replica_context import ReplicaContext
    from kerasdist.api.strategy import Strategy


def get_strategy() -> Strategy:
    """Returns the strategy in force.

    Example::

        with strategy.scope():
            assert kd.get_strategy() is strategy

    Returns:
        The strategy whose scope is open in this thread, or whose replica code this is; outside both
        the default strategy, which has one replica.
    """
    return cast("Strategy", context.strategy_in_force())


def has_strategy() -> bool:
    """Returns whether a strategy other than the default one is in force.

    Example::

        assert not kd.has_strategy()
        with strategy.scope():
            assert kd.has_strategy()
    """
    strategy = context.scoped_strategy()
    return strategy is not None and strategy is not context.default_strategy()


def get_replica_context() -> ReplicaContext | None:
    """Returns the context of the replica whose code this is.

    Example::

        def on_replica():
            return kd.get_replica_context().all_reduce("SUM", keras.ops.ones(()))


        strategy.run(on_replica)  # the number of replicas, on each

    Returns:
        The `ReplicaContext`; that of the default strategy outside every scope; None in
        cross-replica code, that is inside ``with strategy.scope():``.
    """
    return cast("ReplicaContext | None", context.replica_context_in_force())


def in_cross_replica_context() -> bool:
    """Returns whether this is code for all replicas together, as in ``with strategy.scope():``.

    Example::

        with strategy.scope():
            assert kd.in_cross_replica_context()
    """
    return context.replica_context_in_force() is None
