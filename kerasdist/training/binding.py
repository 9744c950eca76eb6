"""What binds an object to a strategy: the trainer of a model, and a mixin before a class.

A model keeps its own class. Its trainer is an attribute of the object, which Keras's hooks ask. A
metric or a regularizer gets a new subclass, with a class of kerasdist before the user's own; it
keeps the user's name and module, so that the object is saved, loaded and printed as before.
"""

from __future__ import annotations

import weakref

import keras

from kerasdist import keras_compat
from kerasdist.backends.base.trial import TrainerLike

# The attribute for a model's trainer.
TRAINER = "_kerasdist_trainer"


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


def remember_trainer(model: keras.Model, trainer: TrainerLike) -> None:
    """Keeps the trainer on a model, without Keras's tracking of attributes."""
    object.__setattr__(model, TRAINER, trainer)


def require_trainer(model: object) -> TrainerLike:
    """Returns the trainer of a model that was made in a scope."""
    trainer = trainer_of(model)
    assert trainer is not None, model
    return trainer


def trainer_of(model: object) -> TrainerLike | None:
    """Returns the trainer of a model, None for a model made outside of every scope."""
    return vars(model).get(TRAINER)
