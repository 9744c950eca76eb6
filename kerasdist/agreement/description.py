"""Any value as JSON that is equal on workers which run the same script in the same way.

Addresses, the order of sets and dictionaries, names that Keras numbers, seeds and initializers are
left out: they say nothing about the computation, and variables start with the chief's values.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import json
import math
import re
import zlib
from collections.abc import Collection, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any, cast

import keras
import numpy as np

from kerasdist import keras_compat
from kerasdist.agreement import code
from kerasdist.backends.base.checks import checksum_of

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

# Arguments that do not change what is computed from equal variables.
_LEFT_OUT = frozenset({"name", "seed"})

# Longer texts are compared by a digest.
_LONG = 1000

# Arrays are read in blocks of so many bytes. Of more than the most, that many are compared, in
# blocks all over the array, which takes half a second.
_BLOCK, _MOST = 1 << 22, 1 << 30


def described(value: Any, known: Collection[str] = ()) -> Any:
    """Returns a value as JSON; the class alone of a value that cannot be described."""
    try:
        return _described(value, known)
    except Exception:  # noqa: BLE001  user-defined properties that fail, endless structures
        return type(value).__name__


def _described(value: Any, known: Collection[str]) -> Any:
    match value:
        case None | bool() | int():
            return value
        case str():
            text = _ADDRESS.sub("", value)
            return text if len(text) <= _LONG else _digest(text.encode())
        case float() | np.floating():
            number = float(value)
            return number if math.isfinite(number) else repr(number)
        case enum.Enum():
            return value.name
        case np.integer():
            return int(value)
        case bytes():
            return _digest(value)
        case Mapping():
            return _of_mapping(cast("Mapping[Any, Any]", value), known)
        case set() | frozenset():
            members = [described(one, known) for one in cast("set[Any]", value)]
            return sorted(members, key=lambda one: json.dumps(one, sort_keys=True))
        case list() | tuple():
            return [described(one, known) for one in cast("list[Any]", value)]
    return _of_object(value, known)


def configuration(instance: Any, known: Collection[str] = ()) -> dict[str, Any]:
    """Returns the arguments that a Keras object was made with and keeps, and its user-defined code.

    Not by `get_config`: that serializes, for which Keras imports TensorFlow on every backend.
    """
    kind = cast("type[Any]", type(instance))
    given = {} if keras_compat.is_wired(instance) else _kept(instance)
    if code.is_of_user(kind):
        given = {name: value for name, value in given.items() if name not in code.OWN}
        given |= _functions(instance)
    return {"class": kind.__name__, **described(given, known), **code.of_class(kind)}


def _kept(instance: Any) -> dict[str, Any]:
    kept, found = vars(instance), dict[str, Any]()
    is_own = code.is_of_user(type(instance))
    # Keras takes some arguments, such as `rms_scaling`, without naming them.
    others = () if is_own else (name for name in kept if name[0] != "_" and _is_setting(name, kept))
    for name in dict.fromkeys((*_parameters(type(instance)), *others)):
        value = kept.get(name, kept.get(f"_{name}", _MISSING))
        if isinstance(value, keras.Variable):
            value = _MISSING if len(value.shape) else _numpy(value).item()
        if value is _MISSING or (is_own and not _is_plain_or_of_keras(value)):
            continue
        found[name] = value
    if isinstance(instance, keras.Layer):
        found["dtype"] = instance.dtype_policy
        found["activity_regularizer"] = instance.activity_regularizer
    options = kept.get("_fn_kwargs")  # of a loss or metric that is a function
    return {**found, "options": options} if isinstance(options, dict) and options else found


_MISSING = object()

# Suffixes of arguments for initial values, which come from the chief anyway.
_START = "initializer"


def _is_setting(name: str, kept: Mapping[str, Any]) -> bool:
    return type(kept[name]) in (bool, int, float, str) and name not in {"built", "training"}


def _is_plain_or_of_keras(value: Any) -> bool:
    if isinstance(value, bool | int | float | str | tuple | None):
        return True
    return callable(getattr(value, "get_config", None))


def _parameters(kind: type) -> Iterator[str]:
    """Yields the names of a class's arguments, and of those that it passes on to its parents."""
    for parent in kind.__mro__:
        made = vars(parent).get("__init__")
        if isinstance(made, FunctionType):
            own = inspect.unwrap(made).__code__
            named = own.co_varnames[1 : own.co_argcount + own.co_kwonlyargcount]
            yield from (name for name in named if name not in _OWN_FORM)


# Arguments that have a form of their own here, or stand elsewhere.
_OWN_FORM = {"dtype", "trainable", "activity_regularizer"}


def _functions(instance: Any) -> dict[str, Any]:
    """Returns the user-defined functions that a user-defined object keeps."""
    return {
        name: value
        for name, value in vars(instance).items()
        if isinstance(value, FunctionType) and code.is_of_user(value) and name not in _WRAPPED
    }


# Methods that Keras wraps on each layer.
_WRAPPED = frozenset({"build", "call", "quantize"})


def of_array(array: Any) -> dict[str, Any]:
    """Returns the shape and type of an array, and a checksum of its rows, in their order."""
    facts = {"shape": str(tuple(array.shape)), "dtype": str(array.dtype)}
    try:
        return {**facts, "rows": _rows(array)}
    except Exception:  # noqa: BLE001  sparse, ragged, symbolic
        return facts


def _rows(array: Any) -> str:
    if len(array.shape) == 0:
        array = array.reshape(1)
    count = int(array.shape[0])
    if count == 0:
        return ""
    row = max(_numpy(array[:1]).nbytes, 1)
    each = max(_BLOCK // row, 1)
    begins = range(0, count, each)
    most = max(_MOST // (row * each), 2)
    if len(begins) > most:  # with the first and the last block
        begins = [begins[number * (len(begins) - 1) // (most - 1)] for number in range(most)]
    checksum = 0
    for begin in begins:
        checksum = _checksum(_numpy(array[begin : begin + each]), checksum)
    return f"{checksum:08x}"


def _numpy(rows: Any) -> np.ndarray[Any, Any]:
    return rows if isinstance(rows, np.ndarray) else np.asarray(keras.ops.convert_to_numpy(rows))


def _checksum(rows: np.ndarray[Any, Any], start: int) -> int:
    if rows.dtype == object:
        return zlib.crc32(repr(rows.tolist()).encode(), start)
    return checksum_of(rows, start)


def _of_mapping(value: Mapping[Any, Any], known: Collection[str]) -> Any:
    return {
        str(name): described(inner, known)
        for name, inner in value.items()
        if name not in _LEFT_OUT and not str(name).endswith(_START)
    }


def _of_object(value: Any, known: Collection[str]) -> Any:
    if isinstance(value, type):
        return cast("type[Any]", value).__name__
    if isinstance(value, FunctionType):
        facts = code.of_function(value)
        return described(facts) if len(facts) > 1 else facts["function"]
    if isinstance(value, MethodType):
        return {"method": value.__name__, **code.of_class(type(value.__self__))}
    if isinstance(value, functools.partial):
        made = cast("functools.partial[Any]", value)
        return {"partial": described(made.func), "given": described([made.args, made.keywords])}
    if len(getattr(value, "shape", ())) > 0 and getattr(value, "dtype", None) is not None:
        return of_array(value)
    wrapped = getattr(value, "__wrapped__", None)  # a function that a framework has compiled
    if isinstance(wrapped, FunctionType):
        return described(wrapped)
    if isinstance(value, keras.DTypePolicy):
        return value.name
    if callable(getattr(value, "get_config", None)):
        if type(value).__name__ in known:
            return type(value).__name__
        facts = configuration(value, known)
        return facts if len(facts) > 1 else facts["class"]
    kind = cast("type[Any]", type(value))
    if dataclasses.is_dataclass(value):
        named = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        return {"class": kind.__name__, **described(named, known)}
    if isinstance(value, np.generic):
        return described(value.item())
    own = code.of_class(kind) if code.is_of_user(kind) and getattr(value, "__dict__", None) else {}
    return {"class": kind.__name__, **own} if own else kind.__name__


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
