"""Variables that are made while a function of a custom loop runs.

A replica reads variables through a `keras.StatelessScope`, in which Keras gives new variables no
value. So the first replica that needs a variable makes it outside of this scope, on the device that
holds all variables. The other replicas then use it, just as they use a layer that is already built.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import keras
import torch

from kerasdist import keras_compat
from kerasdist.backends.base.variable_rules import terms_of_initial_value
from kerasdist.backends.torch.replica.collectives import collectives_here
from kerasdist.backends.torch.state.reads import ReadRecorder
from kerasdist.backends.torch.state.variables import ReplicaScope


@cache
def install() -> None:
    """Installs the hook into Keras's creation of variables, once per process."""
    keras_compat.install(variable_made=_make_variable)


def _make_variable(
    original: Callable[..., None], variable: keras.Variable, *args: object, **kwargs: object
) -> None:
    scope, collectives = keras_compat.get_stateless_scope(), collectives_here()
    while isinstance(scope, ReadRecorder):
        scope = scope.original_scope
    place: AbstractContextManager[object] = nullcontext()
    if scope is None:
        place = keras_compat.outside_stateless_scopes()
    elif (
        collectives is not None
        and collectives.can_create_variables
        and isinstance(scope, ReplicaScope)
    ):
        place = collectives.no_replica()
    with place:
        original(variable, *args, **kwargs)
    terms = terms_of_initial_value(variable)
    in_fit = collectives is not None and collectives.scope.rules.is_fit
    if terms > 1 and not in_fit and keras_compat.stored_value(variable) is not None:
        with torch.no_grad():
            keras_compat.stored_value(variable).mul_(terms)
