"""Models made outside of the scope: they train on one device, which must not happen in silence."""

from __future__ import annotations

import weakref
from typing import Any

from kerasdist import context, ownership
from kerasdist.errors import ScopeError
from kerasdist.job.current import current
from kerasdist.user_warnings import warn_user

# Of whose place the user has been told.
_told: weakref.WeakSet[Any] = weakref.WeakSet()

_TRAINING = ("fit", "train_on_batch")


def require_no_scope(model: Any) -> None:
    """Refuses to compile, in the scope of a strategy, a model made outside of it.

    Args:
        model: A model of no strategy.

    Raises:
        ScopeError: If the scope of a strategy of several replicas is open.
    """
    here = context.get_strategy()
    if here.num_replicas_in_sync > 1:
        raise ScopeError(
            "Expected a model made in the scope in which it is compiled. Received: model="
            f"{model.name!r}, made outside of the scope of {here}. Make the model, too, inside of "
            "`with strategy.scope():`. To train it on one device, compile it outside."
        )


def warn(model: Any, call: str) -> None:
    """Tells the user once that a model runs on one device, unless that is clearly meant.

    It is meant where another model was made in the scope of the strategy that there is.

    Args:
        model: A model of no strategy.
        call: What it was asked to do, such as ``"fit"``.

    Raises:
        ScopeError: In a job of several workers, of which each would train by itself.
    """
    here = context.get_strategy()
    strategy = here if here.num_replicas_in_sync > 1 else ownership.unused_strategy()
    if strategy is None or model in _told:
        return
    job = current()
    place = (
        f"model={model.name!r}, made outside of the scope of {strategy}. Make and compile the "
        "model inside of `with strategy.scope():`"
    )
    if job is not None and call in _TRAINING and (strategy is here or not ownership.any_is_used()):
        raise ScopeError(
            f"[worker {job.rank}/{job.num_workers}] Expected a model made in the scope of the "
            f"job's strategy: each worker would train by itself, on all data. Received: {place}. "
            "To train a model on each worker by itself, make it in the scope of "
            "kerasdist.OneDeviceStrategy."
        )
    _told.add(model)
    warn_user(
        f"Expected a model made in the scope of the strategy. Received: {place}. "
        f"As it is, `{call}` runs on one device, as in plain Keras."
    )


def take_on(model: Any) -> None:
    """Prepares a model of no strategy for training that shares layers with a strategy's model.

    Args:
        model: A model of no strategy.

    Raises:
        ScopeError: In a job of several workers, whose copies of the layers would come to differ.
    """
    owners = [ownership.strategy_of(variable) for variable in model.variables]
    for owner in {id(one): one for one in owners if one is not None}.values():
        replicas = owner.replica_set
        if replicas is None or owner.num_replicas_in_sync == 1:
            continue
        if replicas.job is not None:
            raise ScopeError(
                f"[worker {replicas.job.rank}/{replicas.job.num_workers}] Expected a model made in "
                "the scope of the strategy whose layers it trains: each worker would train its own "
                f"copy of them. Received: model={model.name!r}, made outside of the scope of "
                f"{owner}. Make and compile it inside of `with strategy.scope():`."
            )
        replicas.take_on(model)
