"""Finds where users' code may keep state: in globals, closures and the attributes of objects."""

from __future__ import annotations

import dis
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, final

import keras

from kerasdist import keras_compat
from kerasdist.backends.base.kept_state import Attributes, KeptState, Place, belongs_to_user
from kerasdist.backends.base.model_trainer import trainer_of
from kerasdist.core.internals import codes_in

_MOST_FUNCTIONS = 1000
# A name with a value of these types holds no state if no code assigns to the name.
_CONSTANTS = int, float, str, bytes, type(None), ModuleType

# For each type of object that wraps a function: the attributes that hold what it wraps.
_PARTS: Mapping[type, Sequence[str]] = {
    MethodType: ("__func__", "__self__"),
    property: ("fget",),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
}


def kept_state_of(model: Any) -> KeptState | None:
    """Returns the state that users' code in a model may change; None if there is none."""
    places = _code_of(model).places
    return KeptState(places) if places else None


def may_draw(model: Any) -> bool:
    """Returns whether users' code in a model may use the random generators of Python or NumPy."""
    return any("random" in name or "rng" in name.lower() for name in _code_of(model).names)


def _code_of(model: Any) -> _Code:
    layers = [model, *keras_compat.flat_layers(model)]
    losses = [one for one in keras.tree.flatten(model.loss) if not isinstance(one, str)]
    wrapper = getattr(keras.layers, "TorchModuleWrapper", ())
    modules = [list(one.module.modules()) for one in layers if isinstance(one, wrapper)]
    code = _Code()
    trainer = trainer_of(model)
    metrics = [*keras_compat.attached_metrics(model), *(trainer.given_metrics if trainer else ())]
    for one in itertools.chain(layers, metrics, losses, *modules):
        code.look_at(one, is_shared=False)
        code.look(one)
    return code


@contextmanager
def state_kept(model: Any) -> Iterator[None]:
    """When the block ends, undoes the changes that the block has made to users' Python objects.

    Layers that were built inside of the block stay built.
    """
    kept = kept_state_of(model)
    if kept:
        kept.begin(0)
    try:
        yield
    finally:
        if kept:
            kept.take()


@final
class _Code:
    """Collects the places in which users' code may keep state, and the names in this code."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.names: set[str] = set()
        self._seen: set[int] = set()

    def look_at(self, one: Any, *, is_shared: bool) -> None:
        """Examines a layer, a metric, a loss, or another object that users' code mentions."""
        if hasattr(one, "__dict__") and id(one) not in self._seen:
            self._seen.add(id(one))
            if belongs_to_user(type(one)):
                self._add(Attributes(vars(one)), is_shared=is_shared)
                for kind in type(one).__mro__:
                    self.look(kind)
            for value in [*vars(one).values()]:
                self.look(value)

    def look(self, value: Any) -> None:
        """Examines a function, a class with all that it defines, or an object."""
        if id(value) in self._seen or len(self._seen) > _MOST_FUNCTIONS:
            return
        for name in _PARTS.get(type(value), ()):
            self.look(getattr(value, name))
        if isinstance(value, functools.partial):
            given = [value.func, *value.args, *value.keywords.values()]
            self._add(Place(given))
            for one in given:
                self.look(one)
        if isinstance(value, type):
            if not belongs_to_user(value):
                return
            self._seen.add(id(value))
            for name, one in [*vars(value).items()]:
                self.look(one)
                if not (name.startswith("__") or callable(one) or hasattr(type(one), "__get__")):
                    self._add(Attributes(value, (name,)))
        elif isinstance(value, FunctionType):
            if belongs_to_user(value):
                self._seen.add(id(value))
                self._look_into(value)
        elif belongs_to_user(type(value)):
            self.look_at(value, is_shared=True)

    def _add(self, place: Place, *, is_shared: bool = True) -> None:
        place.is_shared = is_shared
        self.places.append(place)

    def _look_into(self, function: FunctionType) -> None:
        given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        if given:
            self._add(Place(given))
        if vars(function):
            self._add(Attributes(vars(function)))
        for cell in function.__closure__ or ():
            name = Attributes(cell, ("cell_contents",))
            value = name.before.get("cell_contents")
            self.look(value)
            if not isinstance(value, FunctionType | type | ModuleType):
                self._add(name)
        code = function.__code__
        names = {name for one in codes_in(code) for name in one.co_names}
        assigned = {*_assigned(code)}
        known = function.__globals__
        self.names |= names | {str(getattr(known.get(name), "__module__", "")) for name in names}
        modules = [one for name in names if isinstance(one := known.get(name), ModuleType)]
        for space in (known, *(vars(one) for one in modules if belongs_to_user(one))):
            for name in names & space.keys():
                value = space[name]
                self.look(value)
                is_constant = callable(value) or isinstance(value, _CONSTANTS)
                if name in assigned or not is_constant:
                    self._add(Attributes(space, (name,)))


def _assigned(code: CodeType) -> Iterator[str]:
    """Yields the names of globals and attributes that code assigns to."""
    for one in codes_in(code):
        for instruction in dis.get_instructions(one):
            if instruction.opname in ("STORE_GLOBAL", "STORE_ATTR"):
                yield instruction.argval
