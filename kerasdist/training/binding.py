"""What binds an object to a strategy: a mixin before its class.

A model keeps its own class. A metric or a regularizer gets a new subclass, with a class of
kerasdist before the user's own; it keeps the user's name and module, so that the object is saved,
loaded and printed as before.
"""

from __future__ import annotations

import weakref

from kerasdist import keras_compat

# Weak on both sides, since a class refers to its bases: a user's class may go with its last object.
_bound: weakref.WeakKeyDictionary[type, weakref.WeakValueDictionary[tuple[type, ...], type]] = (
    weakref.WeakKeyDictionary()
)


def bind(instance: object, front: type, *behind: type) -> None:
    """Puts `front` before the class of one object, unless it is there already.

    Each class of `behind` comes right before its own base, which is one of the object's: what the
    object's class passes on to that base by ``super()``, it gets first.
    """
    if not isinstance(instance, front):
        object.__setattr__(instance, "__class__", _bound_class(type(instance), front, behind))


def _bound_class(own: type, front: type, behind: tuple[type, ...]) -> type:
    """Returns the subclass of `own` that has `front` before it, and other classes behind."""
    known = _bound.setdefault(own, weakref.WeakValueDictionary())
    bound = known.get((front, *behind))
    if bound is not None:
        return bound
    is_base = any(own in one.__bases__ for one in behind)
    bound = type(
        own.__name__,
        (front, *behind) if is_base else (front, own, *behind),
        {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__},
    )
    keras_compat.serialize_as(own, bound)
    known[front, *behind] = bound
    return bound
