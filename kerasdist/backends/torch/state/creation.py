"""Variables that are made while a function of a custom loop runs.

A replica sees variables through a `keras.StatelessScope`, in which Keras gives new variables no
value. So the first replica that needs a variable makes it outside of the scope, on the device that
holds the variables. The other replicas then use it, as they use a layer that is already built.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import keras
import torch

from kerasdist import keras_compat
from kerasdist.backends.base.variable_rules import is_on_read
from kerasdist.backends.torch.replica.collectives import TorchCollectives
from kerasdist.backends.torch.state.reads import ReadRecorder
from kerasdist.backends.torch.state.variables import ReplicaScope
from kerasdist.core import context


@cache
def install() -> None:
    """Puts the hooks into Keras, once in a process."""
    keras_compat.install(variable_made=_make_variable)


def _make_variable(
    original: Callable[..., None], variable: keras.Variable, *args: object, **kwargs: object
) -> None:
    _make(original, variable, *args, **kwargs)
    strategy, collectives = context.scoped_strategy(), _collectives()
    if (
        strategy is not None
        and strategy.num_replicas_in_sync > 1
        and is_on_read(variable)
        and variable.aggregation == "sum"
        and keras_compat.stored_value(variable) is not None
        and (collectives is None or not collectives.scope.rules.is_fit)
    ):
        # Each component starts with the initial value, so the variable starts with their sum.
        with torch.no_grad():
            keras_compat.stored_value(variable).mul_(strategy.num_replicas_in_sync)


def _make(
    original: Callable[..., None], variable: keras.Variable, *args: object, **kwargs: object
) -> None:
    scope = keras_compat.stateless_scope()
    while isinstance(scope, ReadRecorder):
        scope = scope.original_scope
    collectives = _collectives()
    if scope is None:
        with keras_compat.outside_stateless_scopes():
            original(variable, *args, **kwargs)
    elif (
        collectives is not None
        and collectives.can_create_variables
        and isinstance(scope, ReplicaScope)
    ):
        with collectives.no_replica():
            original(variable, *args, **kwargs)
    else:
        original(variable, *args, **kwargs)


def _collectives() -> TorchCollectives | None:
    replica = context.replica()
    collectives = None if replica is None else replica.collectives
    return collectives if isinstance(collectives, TorchCollectives) else None
