"""Functions that return the strategy and replica of the calling code, and `kerasdist.print`."""

from __future__ import annotations

import builtins
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from kerasdist.api.options import ReduceOp
from kerasdist.cluster import detection
from kerasdist.core import context
from kerasdist.errors import KerasdistError, ScopeError
from kerasdist.job.job import current_job

if TYPE_CHECKING:
    from kerasdist.api.replica_context import ReplicaContext
    from kerasdist.api.strategy import Strategy


def get_strategy() -> Strategy:
    """Returns the strategy that applies to the calling code.

    Example::

        with strategy.scope():
            assert kd.get_strategy() is strategy

    Returns:
        The strategy whose scope is open in this thread, or whose `run` has called the code. In the
        code of a model that `fit`, `evaluate` or `predict` runs, the result is the model's
        strategy. Anywhere else, the result is the default strategy, which has one replica.
    """
    return cast("Strategy", context.strategy_in_force())


def has_strategy() -> bool:
    """Returns whether a strategy other than the default strategy applies to the calling code.

    Example::

        assert not kd.has_strategy()
        with strategy.scope():
            assert kd.has_strategy()
    """
    strategy = context.scoped_strategy()
    return strategy is not None and strategy is not context.default_strategy()


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Opens a strategy's scope for all following code of this thread, such as notebook cells.

    Example::

        kd.experimental_set_strategy(strategy)
        model = keras.Sequential([keras.layers.Dense(1)])  # as in `with strategy.scope():`
        kd.experimental_set_strategy(None)

    Args:
        strategy: The strategy. It replaces a strategy that an earlier call has set. None closes the
            scope.

    Raises:
        ScopeError: If the call is inside of ``with strategy.scope():``, or in code that a replica
            runs.
    """
    current = context.current
    if current.replicas or current.scopes[current.set_scope is not None :]:
        raise ScopeError(
            "Expected experimental_set_strategy outside of scopes and replicas. Received: a call "
            f"in the scope of {context.strategy_in_force()}. Leave the scope first."
        )
    if current.set_scope is not None:
        current.set_scope.__exit__(None, None, None)
    current.set_scope = None if strategy is None else strategy.scope()
    if current.set_scope is not None:
        current.set_scope.__enter__()


def get_loss_reduction() -> ReduceOp:
    """Returns how the losses and gradients of the replicas are reduced: by their sum.

    Example::

        assert kd.get_loss_reduction() is kd.ReduceOp.SUM
    """
    return ReduceOp.SUM


def get_replica_context() -> ReplicaContext | None:
    """Returns the context of the replica whose code is running.

    Example::

        def on_replica():
            return kd.get_replica_context().all_reduce("SUM", keras.ops.ones(()))


        strategy.run(on_replica)  # each replica returns the number of replicas

    Returns:
        The `ReplicaContext` of the replica, in a function that `Strategy.run` calls and in the code
        of a model. Outside of every scope, the result is the context of the default strategy. In
        cross-replica context, as directly inside of ``with strategy.scope():``, the result is None.
        In `fit` on JAX a single replica has all rows of the global batch, so the collectives of its
        context return their arguments unchanged.
    """
    return cast("ReplicaContext | None", context.replica_context_in_force())


def in_cross_replica_context() -> bool:
    """Returns whether the calling code runs once for all replicas, as in a strategy's scope.

    Example::

        with strategy.scope():
            assert kd.in_cross_replica_context()
    """
    return context.replica_context_in_force() is None


def print(*values: Any, **options: Any) -> None:
    r"""Prints on the chief only, so that a job prints each line once.

    In a single process this function is Python's ``print``. Every worker computes the arguments. So
    an argument may be a call that all workers must make, such as ``model.evaluate(...)``. In a
    function that `Strategy.run` calls, each of the chief's replicas prints.

    Example::

        history = model.fit(x, y)
        kd.print("final loss:", history.history["loss"][-1])

    Args:
        *values: What to print.
        **options: The options of Python's ``print``: `sep`, `end`, `file` and `flush`.
    """
    job = current_job()
    is_chief = _is_chief_by_environment() if job is None else job.is_chief
    if is_chief:
        builtins.print(*values, **options)  # noqa: T201 - printing is the purpose of this function


@cache
def _is_chief_by_environment() -> bool:
    """Returns whether this process has no job, or will be the chief of its job.

    The answer comes from environment variables, such as ``TF_CONFIG``. `print` calls this
    function as long as the process has not joined a job.
    """
    try:
        resolver = detection.detect()
    except KerasdistError:  # the user will get this error when the strategy is made
        return True
    return resolver is None or resolver.membership().is_chief
