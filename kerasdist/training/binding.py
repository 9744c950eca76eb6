"""Binds an object made in a scope to its strategy, and adds behaviour to it.

The object's class is replaced by a new subclass, with a class of kerasdist before the user's own.
It keeps the user's name and module, so that the object is saved, loaded and printed as before.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import keras

from kerasdist import keras_compat
from kerasdist.backends.base.interface import ReplicaSet

if TYPE_CHECKING:
    from kerasdist.api.strategy import Strategy

# The attribute for a model's binding.
_BINDING = "_kerasdist_binding"


# Weak on both sides, since a class refers to its bases: a user's class may go with its last model.
_bound: weakref.WeakKeyDictionary[type, weakref.WeakValueDictionary[type, type]] = (
    weakref.WeakKeyDictionary()
)


def bound_class(front: type, own: type) -> type:
    """Returns the subclass of `own` that has `front` before it."""
    known = _bound.setdefault(own, weakref.WeakValueDictionary())
    bound = known.get(front)
    if bound is not None:
        return bound
    bound = type(
        own.__name__,
        (front, own),
        {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__},
    )
    keras_compat.serialize_as(own, bound)
    known[front] = bound
    return bound


def bind(instance: object, front: type) -> None:
    """Puts `front` before the class of one object, unless it is there already."""
    if not isinstance(instance, front):
        object.__setattr__(instance, "__class__", bound_class(front, type(instance)))


@dataclass(frozen=True)
class Binding:
    """The strategy that a model was made under.

    Attributes:
        strategy: The strategy of that scope.
        replicas: Its devices, and how to compute on them.
    """

    strategy: Strategy
    replicas: ReplicaSet


def remember(model: keras.Model, binding: Binding) -> None:
    """Keeps the binding on a model, and what a trainer reads of it, without Keras's tracking."""
    kept = {_BINDING: binding, "bound_strategy": binding.strategy, "replica_set": binding.replicas}
    for name, value in kept.items():
        object.__setattr__(model, name, value)


def binding_of(model: object) -> Binding | None:
    """Returns the binding of a model, None for a model made outside of every scope."""
    return vars(model).get(_BINDING)
