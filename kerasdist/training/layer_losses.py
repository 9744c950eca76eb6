"""The losses that layers add: by ``add_loss``, and by an activity regularizer.

All replicas share the layer objects, so kerasdist keeps the losses of ``add_loss`` separately for
each replica. If Keras or the user has opened a ``keras.StatelessScope`` (``stateless_call``, or
Keras's own step on JAX), Keras keeps the losses of ``add_loss`` in that scope.

The activity regularizers L1 and L2 need no change, because Keras divides their penalties by the
number of rows, so the penalties are means over the examples. Any other activity regularizer is
called with the rows of all replicas. Keras before 3.14 does not divide L1 and L2, so there L1 and
L2 are called with the rows of all replicas, too.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from functools import partial, wraps
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any
from weakref import WeakSet

import keras

from kerasdist import keras_compat
from kerasdist.core.context import ReplicaLike, current
from kerasdist.keras_compat import internals, ops
from kerasdist.training import numerics
from kerasdist.training.binding import bind

# The regularizers whose penalties are means over examples.
_MEANS = (
    (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
    if keras_compat.DIVIDES_ACTIVITY_PENALTY
    else ()
)


def add_loss(original: Callable[..., Any], layer: keras.Layer, loss: object) -> None:
    """Stores a loss that a layer adds in its call, among the losses of the current replica."""
    if current.replica is not None:
        keras_compat.require_losses_of_layers()
    losses = _of_replica()
    if losses is None:
        original(layer, loss)
    else:
        losses.setdefault(id(layer), (layer, []))[1].extend(keras.tree.flatten(loss))


def losses(original: Callable[..., list[Any]], layer: keras.Layer) -> list[Any]:
    """Returns the current replica's losses of a layer and its inner layers, then Keras's own."""
    of_replica, others = _of_replica(), original(layer)
    if not of_replica:
        return others
    layers = [layer, *keras_compat.flat_layers(layer)]
    added = [of_replica.get(id(inner), (inner, ()))[1] for inner in layers]
    return [*itertools.chain(*added), *others]


def clear_losses(original: Callable[..., Any], layer: keras.Layer) -> None:
    """Removes the losses of a layer and of the layers inside it."""
    losses = _of_replica()
    if losses is None:
        original(layer)
        return
    # Keras calls this only for the outermost layer, so inner layers are cleared too.
    for inner in [layer, *keras_compat.flat_layers(layer)]:
        losses.pop(id(inner), None)
        if current.trial is None:  # Keras's own list may have losses of earlier calls
            getattr(inner, internals.LOSSES.attribute, []).clear()


def hand_over(replicas: Sequence[ReplicaLike]) -> None:
    """Stores the losses of `add_loss` on their layers, so that users find them in `layer.losses`.

    Of each loss, the weighted mean over the replicas is stored. Nothing is stored in a trial, which
    is a training step on copies of the variables.
    """
    if current.trial is not None:
        return
    everyones = [replica.layer_losses for replica in replicas]
    for key, (layer, _) in everyones[0].items():
        parts = [of_replica[key][1] for of_replica in everyones if key in of_replica]
        if len(parts) == len(replicas):
            internals.LOSSES.of(layer)[:] = [
                sum(
                    numerics.weighted(ops.stop_gradient(loss), replica.local_batch.weight)
                    for loss, replica in zip(losses, replicas, strict=True)
                )
                for losses in zip(*parts, strict=False)
            ]


def _of_replica() -> dict[int, tuple[Any, list[Any]]] | None:
    """Returns the losses that kerasdist keeps for the current replica; None if Keras keeps them."""
    replica, scope = current.replica, keras_compat.get_stateless_scope()
    if replica is None:
        # Outside of replicas, kerasdist keeps these losses only for a trial: a training step on
        # copies of the variables, here on one device.
        return None if scope is None or scope is not current.trial else scope.layer_losses
    if scope is None:
        # If there is only one replica, no other replica shares its layers, so Keras's list is used.
        return None if replica.num_replicas_in_sync == 1 else replica.layer_losses
    return None if type(scope) is keras.StatelessScope else replica.layer_losses


class GlobalBatchRegularizer:
    """A mixin that calls an activity regularizer with the rows of all replicas."""

    def __call__(self, x: Any) -> Any:
        """Returns the penalty of all replicas' rows. All replicas must call this method."""
        return _of_global_batch(super().__call__, x)  # type: ignore[misc]


def _of_global_batch(penalty_of: Callable[[Any], Any], x: Any) -> Any:
    replica = current.fit_replica
    if replica is None:
        return penalty_of(x)
    penalty = penalty_of(replica.collectives.all_gather(x))
    if not keras_compat.DIVIDES_ACTIVITY_PENALTY:
        return penalty
    # Keras will divide the penalty by n, the number of this replica's rows. The replica's weight is
    # n / N, where N is the number of rows of all replicas. The result is the penalty divided by N.
    return numerics.weighted(penalty, replica.local_batch.weight)


_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, partial)
_of_functions: WeakSet[Any] = WeakSet()


def _function_of_global_batch(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that calls the regularizer `own` with the rows of all replicas."""

    @wraps(own)
    def penalty(x: Any) -> Any:
        return _of_global_batch(own, x)

    _of_functions.add(penalty)
    return penalty


def prepare(model: keras.Model) -> None:
    """Makes the activity regularizers in a model compute on the rows of all replicas."""
    # The first read of this property searches Keras for the name of the attribute. This is done
    # here, before a step is compiled, because torch's compiler cannot follow the search.
    _ = internals.LOSSES.attribute
    for layer in [model, *keras_compat.flat_layers(model)]:
        own = layer.activity_regularizer
        if own is None or type(own) in _MEANS or isinstance(own, GlobalBatchRegularizer):
            continue
        # The copy is needed because the same object may regularize a kernel, which has no rows.
        if hasattr(own, "__dict__") and not isinstance(own, _FUNCTIONS):
            layer.activity_regularizer = copy.copy(own)
            bind(layer.activity_regularizer, GlobalBatchRegularizer)
        elif own not in _of_functions:
            layer.activity_regularizer = _function_of_global_batch(own)
