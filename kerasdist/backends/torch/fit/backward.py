"""Lets code that runs in the backward pass find its replica.

On a GPU torch runs the backward pass in a thread of the device. This thread does not know the
replica and the Keras scopes of the forward pass. In two cases Keras calls Python code in this
thread: `keras.remat` and `keras.RematScope` compute a layer once more, and
`keras.ops.custom_gradient` computes a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, final

import torch

from kerasdist import keras_compat
from kerasdist.backends.torch.replica.collectives import TorchCollectives, collectives_here
from kerasdist.core.context import ReplicaLike, current, replica_scope


@cache
def install() -> None:
    """Installs into Keras the hooks for `remat` and for custom gradients, once per process."""
    keras_compat.install(remat=_rematerialized, custom_gradient=_with_custom_gradient)


@final
class _Place:
    """The replica and the Keras scopes of the thread that makes this object.

    Another thread can enter them.
    """

    def __init__(self, replica: ReplicaLike) -> None:
        self._replica = replica
        self._keras_state = keras_compat.copy_thread_state()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Returns a context in which the calling thread has this replica and these scopes."""
        if current.replica is self._replica:
            yield
            return
        before = keras_compat.copy_thread_state()
        keras_compat.paste_thread_state(self._keras_state)
        try:
            with replica_scope(self._replica):
                yield
        finally:
            keras_compat.paste_thread_state(before)


def _rematerialized(original: Callable[..., Any], function: Callable[..., Any]) -> Any:
    """Replaces Keras's ``remat``, so that the backward pass repeats a call in the same replica."""
    outside = original(function)

    def wrapped(*args: object, **kwargs: object) -> Any:
        collectives = collectives_here()
        if collectives is None:
            return outside(*args, **kwargs)
        return original(_Repeated(function, collectives))(*args, **kwargs)

    return wrapped


@final
class _Repeated:
    """A function whose later calls have the replica and the random numbers of its first call."""

    def __init__(self, function: Callable[..., Any], collectives: TorchCollectives) -> None:
        self._function = function
        self._place = _Place(collectives.context)
        self._draws: Any = collectives.draws
        self._rank = collectives.rank
        self._begins_at: torch.Tensor | None = None
        self._is_first = True

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if self._is_first:
            self._is_first = False
            self._begins_at = self._draws.state(self._rank)
            return self._function(*args, **kwargs)
        with self._place.entered(), self._draws.again(self._rank, self._begins_at):
            return self._function(*args, **kwargs)


def _with_custom_gradient(
    original: Callable[..., Any], decorated: Any, *args: object, **kwargs: object
) -> Any:
    """Calls a function with a custom gradient, which may be computed in another thread."""
    collectives = collectives_here()
    if collectives is None:
        return original(decorated, *args, **kwargs)
    forward, place = decorated.forward_fn, _Place(collectives.context)
    weights = collectives.scope.weights
    keeps_weights = weights is not None and any(map(weights.has_frozen, args))

    def placed(*args: object, **kwargs: object) -> Any:
        result = forward(*args, **kwargs)
        if not isinstance(result, tuple):  # Keras allows functions that return no gradient
            return result
        output, gradient = result
        # Until the backward pass, the gradient function keeps alive what `forward` has read. Frozen
        # weights that were gathered from shards would thus take too much memory. So if `forward`
        # gets such weights, its gradient function is dropped. The backward pass then calls
        # `forward` once more, to get another gradient function.
        known = None if keeps_weights else gradient

        def placed_gradient(*args: object, **kwargs: object) -> Any:
            with place.entered():
                own = forward(*args)[1] if known is None else known
                return own(*args, **kwargs)

        return output, placed_gradient

    return original(type(decorated)(placed), *args, **kwargs)
