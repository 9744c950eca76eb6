"""How an object made in a scope remembers its strategy and takes on another behaviour.

The object's class is replaced by a subclass made on the fly, with our class in front of the user's
own. It keeps the user's name and module, so that the object is saved, loaded and printed as what
the user wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from kerasdist import keras_seam
from kerasdist.backends.base import ReplicaSet

if TYPE_CHECKING:
    from kerasdist.strategy import Strategy

# The name under which a model holds its binding; set past Keras's tracking of attributes.
_BINDING = "_kerasdist_binding"


@cache
def bound_class(front: type, own: type) -> type:
    """Returns the subclass of `own` that has `front` before it.

    Args:
        front: The class whose methods win.
        own: The object's class.
    """
    bound = type(
        own.__name__,
        (front, own),
        {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__},
    )
    keras_seam.save_as(own, bound)
    return bound


def bind(instance: Any, front: type) -> None:
    """Puts `front` before the class of one object, unless it stands there already.

    Args:
        instance: A model, metric or regularizer.
        front: The class whose methods win.
    """
    if not isinstance(instance, front):
        object.__setattr__(instance, "__class__", bound_class(front, type(instance)))


@dataclass(frozen=True)
class Binding:
    """What a model made in a scope remembers.

    Attributes:
        strategy: The strategy of that scope.
        replicas: Its devices, and how to compute on them.
    """

    strategy: Strategy
    replicas: ReplicaSet


def remember(model: Any, binding: Binding) -> None:
    """Notes what a model was made under.

    Args:
        model: A Keras model.
        binding: The strategy whose scope is open.
    """
    object.__setattr__(model, _BINDING, binding)


def binding_of(model: Any) -> Binding | None:
    """Returns what a model was made under, None for a model made outside of every scope.

    Args:
        model: A Keras model.
    """
    return vars(model).get(_BINDING)
