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
from collections.abc import Collection, Mapping
from types import FunctionType, MethodType
from typing import Any, cast

import keras
import numpy as np

from kerasdist import keras_compat
from kerasdist.agreement import code
from kerasdist.backends.base import checksums

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

# Arguments that do not change what is computed from equal variables.
_LEFT_OUT = frozenset({"name", "seed", "build_config", "compile_config", "registered_name"})

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
    """Returns the arguments that a Keras object was made with, and its user-defined code."""
    kind = cast("type[Any]", type(instance))
    is_own = code.is_of_user(kind)
    kept = None if is_own else _kept_by_layer(instance)
    if kept is not None:
        return {"class": kind.__name__, **_of_kept(kept, known)}
    try:
        given = {} if keras_compat.is_wired(instance) else instance.get_config()
    except Exception:  # noqa: BLE001  user classes need not have one
        given = {}
    # `get_config` gives the path of a user function's file, so the function itself is described.
    given = {**_made_with(instance), **given, **_functions(instance)}
    if is_own:
        given = {name: value for name, value in given.items() if name not in code.OWN}
    return {"class": kind.__name__, **described(given, known), **own_code(instance)}


def _kept_by_layer(instance: Any) -> dict[str, Any] | None:
    """Returns a Keras layer's arguments from its attributes, None if it drops some.

    `get_config` returns the same in a form for saving, which takes twice as long.
    """
    if not isinstance(instance, keras.Layer) or keras_compat.is_wired(instance):
        return None
    kind = cast("type[Any]", type(instance))
    kept, found = vars(instance), dict[str, Any]()
    for name in _compared_parameters(kind):
        value = kept.get(name, kept.get(f"_{name}", _MISSING))
        if value is _MISSING or isinstance(value, keras.Variable):
            return None
        found[name] = value
    found["dtype"] = instance.dtype_policy
    found["activity_regularizer"] = instance.activity_regularizer
    if kind not in _KEEPS_ALL:
        _KEEPS_ALL[kind] = _has_all_of_config(instance, found)
    return found if _KEEPS_ALL[kind] else None


def _has_all_of_config(layer: Any, found: Collection[str]) -> bool:
    try:
        names = layer.get_config()
    except Exception:  # noqa: BLE001  of layers that cannot be saved
        return False
    return all(
        name in found or name in _LEFT_OUT or name == "trainable" or name.endswith(_START)
        for name in names
    )


_MISSING = object()

# Suffixes of arguments for initial values, which come from the chief anyway.
_START = "initializer"

# Per class of Keras layers: whether it keeps all arguments that `get_config` returns.
_KEEPS_ALL: dict[type, bool] = {}


def _of_kept(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Describes arguments, most of which are plain."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if type(value) in _PLAIN:
            found[name] = value
        elif isinstance(value, keras.DTypePolicy):
            found[name] = value.name
        elif isinstance(value, keras.Layer) and type(value).__name__ in known:
            found[name] = type(value).__name__
        else:
            found[name] = described(value, known)
    return found


_PLAIN = frozenset({bool, int, type(None)})


@functools.cache
def _compared_parameters(kind: type) -> tuple[str, ...]:
    left_out = {"self", "args", "kwargs", "dtype", "activity_regularizer", *_LEFT_OUT}
    return tuple(
        name for name in _parameters(kind) if name not in left_out and not name.endswith(_START)
    )


def own_code(instance: Any) -> dict[str, Any]:
    """Returns what an object's user-defined methods compute, nothing if there are none."""
    methods = code.of_class(type(instance))
    if methods is None:
        return {}
    return {"attributes": described(code.attributes(instance)), code.KEY: methods}


def _made_with(instance: Any) -> dict[str, Any]:
    """Returns the arguments that an object keeps, since some `get_config`s omit one (Huber's)."""
    kept, found = vars(instance), dict[str, Any]()
    for name in _parameters(type(instance)):
        value = kept.get(name, kept.get(f"_{name}"))
        if isinstance(value, bool | int | float | str | tuple):
            found[name] = value
    options = kept.get("_fn_kwargs")  # of a loss or metric that is a function
    return {**found, "options": options} if isinstance(options, dict) and options else found


@functools.cache
def _parameters(kind: type) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(kind.__init__).parameters)
    except (TypeError, ValueError):
        return ()


def _functions(instance: Any) -> dict[str, Any]:
    """Returns the user-defined functions that an object keeps."""
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
    return checksums.of_array(rows, start)


def _of_mapping(value: Mapping[Any, Any], known: Collection[str]) -> Any:
    if "class_name" in value and "config" in value:
        return _of_serialized(value, known)
    return {
        str(name): described(inner, known)
        for name, inner in value.items()
        if name not in _LEFT_OUT and not str(name).endswith(_START)
    }


def _of_serialized(value: Mapping[Any, Any], known: Collection[str]) -> Any:
    """Describes a Keras object by its `get_config`, or by its class if that has nothing else."""
    name, config = value["class_name"], value["config"]
    # Keras marshals a lambda's code, with paths in it; `agreement.code` compares functions.
    if name in known or name == "__lambda__" or config is None:
        return name
    if not isinstance(config, Mapping):
        return described(config, known)
    if str(name).endswith("DTypePolicy"):
        return described(dict(config, policy=config.get("name")))
    inner = _of_mapping(cast("Mapping[Any, Any]", config), known)
    return {"class": name, **inner} if isinstance(inner, dict) and inner else name


def _of_object(value: Any, known: Collection[str]) -> Any:
    if isinstance(value, type):
        return cast("type[Any]", value).__name__
    if isinstance(value, FunctionType):
        facts = code.of_function(value)
        return described(facts) if len(facts) > 1 else facts["function"]
    if isinstance(value, MethodType):
        return {"method": value.__name__, **own_code(value.__self__)}
    if isinstance(value, functools.partial):
        made = cast("functools.partial[Any]", value)
        return {"partial": described(made.func), "given": described([made.args, made.keywords])}
    if len(getattr(value, "shape", ())) > 0 and getattr(value, "dtype", None) is not None:
        return of_array(value)
    wrapped = getattr(value, "__wrapped__", None)  # a function that a framework has compiled
    if isinstance(wrapped, FunctionType):
        return described(wrapped)
    if callable(getattr(value, "get_config", None)):
        facts = configuration(value, known)
        return facts if len(facts) > 1 else facts["class"]
    kind = cast("type[Any]", type(value))
    if dataclasses.is_dataclass(value):
        named = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        return {"class": kind.__name__, **described(named, known)}
    if isinstance(value, np.generic):
        return described(value.item())
    own = own_code(value) if code.is_of_user(kind) and getattr(value, "__dict__", None) else {}
    return {"class": kind.__name__, **own} if own else kind.__name__


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
