"""Binds an object to a strategy: replaces the object's class by a subclass that adds a mixin.

A model is not bound: it keeps its own class. A metric or a regularizer, for example, gets a new
subclass, whose first base is a mixin of kerasdist and whose second base is the user's class. The
object's ``__class__`` is still the user's class, so that the object is saved, loaded and printed as
before.
"""

from __future__ import annotations

import weakref
from typing import Any

# Keys and values are weak, so that a user's class can be deleted with its last object.
_bound: weakref.WeakKeyDictionary[type, weakref.WeakValueDictionary[tuple[type, ...], type]] = (
    weakref.WeakKeyDictionary()
)


def bind(instance: object, front: type, *behind: type) -> None:
    """Gives an object a subclass of its class with `front` first, unless it already has `front`.

    Each class in `behind` has one base class, from which the object's class also derives. In the
    method resolution order, each class in `behind` comes right before its base class. So if a
    method of the object's class calls ``super()``, Python finds the method of the class in `behind`
    before the method of the base class.
    """
    if not isinstance(instance, front):
        _set_class(instance, _bound_class(type(instance), front, behind))


# Sets an object's real class. If the object is already bound, `object.__setattr__` would call the
# property ``__class__`` instead.
_set_class: Any = vars(object)["__class__"].__set__


def _bound_class(own: Any, front: type, behind: tuple[type, ...]) -> type:
    """Returns a subclass of `front` (which comes first), `own` and the classes of `behind`."""
    known = _bound.setdefault(own, weakref.WeakValueDictionary())
    bound = known.get((front, *behind))
    if bound is not None:
        return bound
    is_base = any(own in one.__bases__ for one in behind)
    body = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    if "__class__" not in vars(own):  # `own` is not bound itself
        body["__class__"] = property(lambda instance: own)
        if own.__reduce__ is not object.__reduce__:

            def reduce(instance: object) -> tuple[object, ...]:
                function, *rest = own.__reduce__(instance)
                # `function` is a method of the bound class, which pickle cannot find by its name.
                # So the same method of `own` is returned.
                return (getattr(own, function.__name__), *rest)

            body["__reduce__"] = reduce
    bound = type(own.__name__, (front, *behind) if is_base else (front, own, *behind), body)
    known[front, *behind] = bound
    return bound
