"""State that users' code stores in Python objects during a step, as ``self.z = encoder(x)`` does.

The replicas of a process share the objects that hold this state, such as the model and its lists.
Only one replica runs at a time, until it waits in a collective. The next replica would then
overwrite the same attributes and append to the same lists. So a replica undoes its changes before
it waits, and makes them again when it continues. The effect is as if each replica had a process of
its own.
"""

from __future__ import annotations

import operator
import pickle
import random
import sys
import weakref
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from operator import is_
from types import ModuleType, SimpleNamespace
from typing import Any, final

import keras
import numpy as np

from kerasdist import keras_compat

# The limits of the state that is kept for each replica separately: entries of a container, bytes of
# an array, objects of the model, and objects outside of the model. All replicas see changes to
# larger containers and arrays, and to further objects.
_MOST_ENTRIES = 4096
_MOST_BYTES = 1 << 16
_MOST_PLACES = 4096
_MOST_SHARED = 256
_MISSING = object()

# The changes of one replica: the new contents of each `Place` that it has changed, by the key of
# this place in `KeptState._places`.
Changes = dict[Any, Any]


class Place:
    """An object that can hold state, and a copy of its contents at the beginning of the step.

    Attributes:
        at: The object that holds the state.
        before: The contents at the beginning of the step.
        is_shared: Whether the object lies outside of the model, as a global variable does.
        names: The names of the attributes or variables that hold the state; None for all contents.
    """

    is_shared = False
    names: tuple[str, ...] | None = None

    def __init__(self, at: Any) -> None:
        self.at = at
        self.before = self.read()

    def read(self) -> Any:
        """Returns a copy of the object's contents."""
        kind = next((kind for kind in (dict, set) if isinstance(self.at, kind)), list)
        return kind(self.at)

    def write(self, contents: Any) -> None:
        """Sets the object's contents."""
        # Keras's tracked containers override methods such as `clear` and `update`, so the methods
        # of Python's own class are called.
        kind, fill = next((kind, fill) for kind, fill in _FILL.items() if isinstance(self.at, kind))
        kind.clear(self.at)
        fill(self.at, contents)

    def restore(self) -> None:
        """Sets the contents back to those at the beginning of the step."""
        self.write(self.before)

    def is_same(self, contents: Any) -> bool:
        """Returns whether the object now contains exactly the objects in `contents`."""
        now = self.at
        if len(now) != len(contents):
            return False
        if not all(map(is_, now, contents)):  # for sets this may be only a difference in order
            return isinstance(now, set) and now == contents
        return not isinstance(now, dict) or all(map(is_, now.values(), contents.values()))

    def values(self) -> Iterable[Any]:
        """Returns the objects that a container contained at the beginning of the step."""
        return _members(self.before)


class _Array(Place):
    def read(self) -> Any:
        return self.at.copy()

    def write(self, contents: Any) -> None:
        self.at[...] = contents

    def is_same(self, contents: Any) -> bool:
        return self.at.shape == contents.shape and self.at.tobytes() == contents.tobytes()


class _Numbers(Place):
    """A generator of random numbers; its contents are the generator's state."""

    def read(self) -> Any:
        return pickle.dumps(self.at.__getstate__())

    def write(self, contents: Any) -> None:
        self.at.__setstate__(pickle.loads(contents))

    def is_same(self, contents: Any) -> bool:
        return self.read() == contents


class Attributes(Place):
    """Attributes of an object, or named variables of a closure, a module or a class."""

    def __init__(self, at: Any, names: tuple[str, ...] | None = None) -> None:
        """Stores an object or a ``__dict__``, and the names of the attributes that hold state.

        If `names` is None, `at` is a ``__dict__``, and all of its attributes are meant.
        """
        self.names = names
        super().__init__(at)

    def read(self) -> Any:
        """Returns the attributes that are set, by name."""
        if self.names is None:
            return dict(self.at)
        if isinstance(self.at, dict):
            return {name: self.at[name] for name in self.names if name in self.at}
        found: dict[str, Any] = {}
        for name in self.names:
            # a variable of a closure that is not set yet raises a ValueError
            with suppress(AttributeError, ValueError):
                found[name] = getattr(self.at, name)
        return found

    def is_same(self, contents: Any) -> bool:
        """Returns whether the attributes now have exactly the objects in `contents` as values."""
        now = self.at if self.names is None else self.read()
        return len(now) == len(contents) and all(map(is_, now.values(), contents.values()))

    def write(self, contents: Any) -> None:
        """Sets attributes; deletes those whose value in `contents` is `_MISSING`."""
        there = self.read()
        is_dict = isinstance(self.at, dict)
        for name, value in contents.items():
            if value is not _MISSING:
                (operator.setitem if is_dict else setattr)(self.at, name, value)
            elif name in there:
                (operator.delitem if is_dict else delattr)(self.at, name)

    def restore(self) -> None:
        """Gives the attributes the values that they had at the beginning of the step."""
        gone = dict.fromkeys(self.read().keys() - self.before.keys(), _MISSING)
        self.write({**self.before, **gone})

    def values(self) -> Iterable[Any]:
        """Returns the attributes' values at the beginning of the step.

        The attributes that Keras itself gives to each layer or model are left out.
        """
        keras_has = _attributes_of_keras() if self.names is None else ()
        return [value for name, value in self.before.items() if name not in keras_has]


def _members(contents: Any) -> Iterable[Any]:
    if isinstance(contents, dict):
        return contents.values()
    return contents if isinstance(contents, list | set) else ()


def _slots_of(value: object) -> Iterator[str]:
    for parent in type(value).__mro__:
        slots = vars(parent).get("__slots__", ())
        yield from [slots] if isinstance(slots, str) else slots


@final
class KeptState:
    """Finds, undoes and repeats the changes that each replica makes to Python objects in a step.

    If a replica stores a new layer, variable or function in an object, as the first call of a model
    does, all replicas see it. All replicas then also see the other attributes that this replica has
    set on the object, if these hold no tensors. Every other change is seen only by the replica that
    has made it. In the next steps this replica sees the change again if the first replica has
    changed the same object too. Code that runs after a step sees the changes of the first replica.
    """

    def __init__(self, roots: Sequence[Place]) -> None:
        """Stores `roots`: the objects and variables with which the search for state begins."""
        self._roots = roots
        self._places: dict[Any, Place] = {}
        # The contents, at the end of the last step, of each object that the first replica has
        # changed. The keys are those of `_places`.
        self._left: dict[Any, Any] = {}
        # The changes that each replica had made by the end of the last step.
        self._own: list[Changes] = []

    def begin(self, replicas: int) -> None:
        """Begins a step.

        If a replica has changed an object in an earlier step, the change is kept on two conditions:
        the first replica has changed the object too, and no code outside of steps has changed the
        object since then.
        """
        places, left = self._places, self._left
        kept = {key for key in left if places[key].is_same(left[key])}
        self._own = [{key: one[key] for key in one if key in kept} for one in self._own]
        self._own += [{} for _ in range(replicas - len(self._own))]
        if not places or any(not one.is_same(one.before) for one in places.values()):
            places = self._places = self._found()
        for own in self._own:
            for key in own.keys() - places.keys():
                del own[key]

    def start(self, replica: int) -> None:
        """Repeats the changes that the replica had made by the end of the last step."""
        if self._own[replica]:
            self.put_back(self._own[replica])

    def take(self) -> Changes:
        """Undoes all changes of the replica that is running, and returns these changes."""
        taken: Changes = {}
        for key, place in self._places.items():
            if not place.is_same(place.before):  # This condition is seldom true and quick to check.
                own = self._own_changes(place)
                if own is not None:
                    taken[key] = own
                    place.restore()
        return taken

    def put_back(self, taken: Changes) -> None:
        """Repeats the changes that `take` has undone and returned."""
        for key, contents in taken.items():
            self._places[key].write(contents)

    def finish(self, replica: int) -> None:
        """Undoes a replica's changes at the end of its step, and stores them for the next step."""
        self._own[replica] = self.take()

    def end(self, *, is_last: bool = False) -> None:
        """Ends the step, and repeats the first replica's changes for the code after the step.

        With `is_last` this object drops all its references to users' objects. Otherwise a traced
        function, which refers to this object, would keep them in memory.
        """
        first = self._own[0] if self._own else {}
        self.put_back(first)
        self._left = {key: self._places[key].read() for key in first}
        if is_last:
            self._places, self._left, self._own = {}, {}, []

    def has_new_tensors(self) -> bool:
        """Returns whether code has stored tensors in Python objects since the step began."""
        taken = self.take()
        self.put_back(taken)
        return any(map(_holds_tensors, taken.values()))

    def _own_changes(self, place: Place) -> Any:
        """Returns an object's new contents if only this replica may see them; otherwise None.

        All replicas see changes that add a layer, a variable or a function. They also see changes
        to objects outside of the model, unless these changes add a tensor.
        """
        now = place.read()
        if isinstance(place, Attributes):
            return self._own_attributes(place, now)
        known = set(map(id, place.values()))
        new = [one for one in _members(now) if id(one) not in known]
        if any(map(_is_made, new)) or (place.is_shared and not any(map(_holds_tensors, new))):
            place.before = now
            return None
        return now

    def _own_attributes(self, place: Attributes, now: dict[str, Any]) -> dict[str, Any] | None:
        before = place.before
        new = {name: one for name, one in now.items() if one is not before.get(name, _MISSING)}
        is_made = any(map(_is_made, new.values())) or _attributes_of_keras() & new.keys()
        if is_made or place.is_shared:
            common = {name: one for name, one in new.items() if not _holds_tensors(one)}
            place.before = {**before, **common}
            new = {name: one for name, one in new.items() if name not in common}
        return {**new, **dict.fromkeys(place.before.keys() - now.keys(), _MISSING)} or None

    def _found(self) -> dict[Any, Place]:
        """Returns a `Place` for each object with state that can be reached from the roots."""
        found: dict[Any, Place] = {}
        waiting: list[Place] = []

        def add(place: Place, is_shared: bool) -> None:
            place.is_shared = is_shared
            key = id(place.at), place.names
            if key not in found and len(found) < most:
                found[key] = place
                waiting.append(place)

        def look(value: Any, is_shared: bool) -> None:
            kind = _kind_of(type(value))
            if kind is None:
                return
            if kind is tuple:
                for one in value[:_MOST_ENTRIES]:
                    look(one, is_shared)
            elif kind is Attributes:
                at = getattr(value, "__dict__", value)
                names = None if at is not value else (*_slots_of(value),)
                add(Attributes(at, names), is_shared)
            elif kind is _Numbers:
                add(_Numbers(getattr(value, "bit_generator", value)), is_shared)
            elif kind is not _Array:
                if len(value) <= _MOST_ENTRIES:
                    add(Place(value), is_shared)
            elif value.nbytes <= _MOST_BYTES and value.flags.writeable:
                add(_Array(value), is_shared)

        most = _MOST_PLACES
        for is_shared in (False, True):  # first objects of the model, then those outside of it
            most = len(found) + _MOST_SHARED if is_shared else _MOST_PLACES
            for root in self._roots:
                if root.is_shared is is_shared:
                    root.before = root.read()
                    add(root, is_shared)
            while waiting:
                place = waiting.pop()
                for value in place.values():
                    look(value, is_shared)
        return found


# For each class of container: the method that adds contents to an empty container.
_FILL: dict[type[Any], Callable[..., None]] = {
    list: list.extend,
    deque: deque.extend,
    set: set.update,
    OrderedDict: OrderedDict.update,
    dict: dict.update,
}
_KINDS: Sequence[tuple[tuple[type, ...], Any]] = (
    ((*_FILL,), Place),
    ((tuple,), tuple),
    ((np.ndarray,), _Array),
    ((random.Random, np.random.Generator, np.random.RandomState), _Numbers),
    (
        (SimpleNamespace, UserDict, weakref.WeakKeyDictionary, weakref.WeakValueDictionary),
        Attributes,
    ),
)


@cache
def _kind_of(kind: type) -> Any:
    """Returns which class of `Place` keeps the contents of objects of the class `kind`.

    For tuples the result is ``tuple``: their members are examined instead. For a class whose
    objects are not examined, the result is None.
    """
    for kinds, place in _KINDS:
        if issubclass(kind, kinds):
            return place
    return Attributes if belongs_to_user(kind) and not issubclass(kind, type) else None


def belongs_to_user(value: Any) -> bool:
    """Returns whether a class, function or module comes from code of the user.

    All packages count as the user's, except Python's standard library, Keras, the frameworks, NumPy
    and kerasdist.
    """
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    package = (module or "builtins").partition(".")[0]
    return package not in keras_compat.PACKAGES and package not in sys.stdlib_module_names


@cache
def _attributes_of_keras() -> frozenset[str]:
    """Returns the names of the attributes that Keras gives to each layer or model."""
    return frozenset({*vars(keras.layers.Layer(name="own")), *vars(keras.Model(name="own"))})


def _is_made(value: Any) -> bool:
    """Returns whether a value contains a layer, variable or function, which all replicas share."""
    return _holds(value, _is_function_or_variable)


def _is_function_or_variable(value: Any) -> bool:
    is_reference = isinstance(value, weakref.ref)
    return (callable(value) and not is_reference) or hasattr(value, "assign")


def _holds_tensors(value: Any) -> bool:
    return _holds(value, _is_tensor)


def _is_tensor(value: Any) -> bool:
    """Returns whether a value is a tensor, and not a variable of TensorFlow.

    Keras's own ``is_tensor`` accepts both.
    """
    return keras.ops.is_tensor(value) and not hasattr(value, "assign")


def _holds(value: Any, are_sought: Callable[[Any], bool]) -> bool:
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple | set | deque):
        return any(_holds(one, are_sought) for one in value)
    return are_sought(value)
