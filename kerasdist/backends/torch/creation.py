"""Layers and variables that are made, or built, while a function of a custom loop runs.

Keras makes none while a `keras.StatelessScope` is open, and that is how a replica sees its
variables. So they are made as if outside of the replica, where the variables live: once, by the
replica that comes first, as the first call of a layer on two replicas would build it once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, final

import torch

from kerasdist import context, keras_seam
from kerasdist.backends.torch.collectives import TorchCollectives
from kerasdist.backends.torch.components import is_on_read
from kerasdist.backends.torch.reads import ReadRecorder
from kerasdist.backends.torch.variables import FIT, ReplicaScope, is_sum
from kerasdist.backends.torch.workers.collectives import WorkerCollectives
from kerasdist.backends.torch.workers.replicas import WorkerReplicaSet


@cache
def install() -> None:
    """Puts the hooks into Keras, once in a process."""
    keras_seam.install_in_variables(_make_variable)
    keras_seam.install_in_build(_build)


def _make_variable(original: Callable[..., None], variable: Any, *args: Any, **kwargs: Any) -> None:
    _make(original, variable, *args, **kwargs)
    replica = context.replica()
    if replica is not None and isinstance(replica.collectives, WorkerCollectives):
        replica.collectives.loops.note(variable)  # made by each worker: it is the component
        return
    strategy = context.scoped_strategy()
    if (
        strategy is not None
        and strategy.num_replicas_in_sync > 1
        and is_on_read(variable)
        and is_sum(variable)
        and keras_seam.stored_value(variable) is not None
    ):
        # Its components start with the value, each of them.
        with torch.no_grad():
            keras_seam.stored_value(variable).mul_(strategy.num_replicas_in_sync)
    if strategy is not None and isinstance(strategy.replica_set, WorkerReplicaSet):
        strategy.replica_set.loops.note(variable)


def _make(original: Callable[..., None], variable: Any, *args: Any, **kwargs: Any) -> None:
    scope = keras_seam.stateless_scope()
    while isinstance(scope, ReadRecorder):
        scope = scope.original_scope
    collectives = _loop_collectives()
    if scope is None:
        with keras_seam.outside_stateless_scopes():
            original(variable, *args, **kwargs)
    elif collectives is not None and isinstance(scope, ReplicaScope):
        with collectives.no_replica():
            original(variable, *args, **kwargs)
    else:
        original(variable, *args, **kwargs)


def _build(original: Callable[..., None], layer: Any, *args: Any, **kwargs: Any) -> None:
    """Lets one replica build a layer at a time; whoever comes later finds it built."""
    if _watched.layers is not None:
        _watched.layers.append(layer)
    collectives = _loop_collectives()
    if collectives is None or layer.built:
        original(layer, *args, **kwargs)
        return
    with collectives.building():
        original(layer, *args, **kwargs)


@final
class _Watched(threading.local):
    """The layers that the calling thread has called, while somebody wants to know."""

    layers: list[Any] | None = None


_watched = _Watched()


@contextmanager
def layers_called() -> Iterator[list[Any]]:
    """Yields a list of the layers that this thread calls inside, as it calls them."""
    outer, layers = _watched.layers, []
    _watched.layers = layers
    try:
        yield layers
    finally:
        _watched.layers = outer


def _loop_collectives() -> TorchCollectives | None:
    replica = context.replica()
    collectives = None if replica is None else replica.collectives
    if isinstance(collectives, TorchCollectives) and collectives.scope.rules is not FIT:
        return collectives
    return None
