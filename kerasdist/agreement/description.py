"""Describes models, calls, and the values in both as JSON, so that workers can compare them.

A description is equal on workers that run the same script in the same way. It leaves out what does
not change the computation: addresses, the order of sets and dictionaries, and names that Keras
makes by counting, such as ``dense_1``. It also leaves out seeds and initializers, because variables
start with the chief's values.
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
from collections.abc import Collection, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

import keras
import numpy as np

from kerasdist import keras_compat
from kerasdist.agreement.results import checksum_of
from kerasdist.core.internals import codes_in, undecorated
from kerasdist.input.distributed import (
    DistributedDataset,
    DividedDataset,
    equivalent,
    shards_itself,
)
from kerasdist.job.job import Job
from kerasdist.keras_compat.internals import FUNCTION_ARGUMENTS

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

# Arguments of Keras objects that do not change the computation, if the variables are equal.
_LEFT_OUT = frozenset({"name", "seed"})

# Texts with more characters than this are replaced by a digest.
_LONG = 1000

# Arrays are read in blocks of `_BLOCK` bytes. If an array has more than `_MOST` bytes, only `_MOST`
# of them are compared, in blocks that are spread over the whole array. To read `_MOST` bytes takes
# half a second.
_BLOCK, _MOST = 1 << 22, 1 << 30


def described(value: object, known: Collection[str] = ()) -> Any:
    """Returns a value as JSON, or only its class if it cannot be described.

    `known` has the names of classes that the caller describes itself. For a Keras object of such a
    class, only the name of its class is returned.
    """
    try:
        return _described(value, known)
    except Exception:  # noqa: BLE001  user's properties may fail, structures may contain themselves
        return type(value).__name__


def _described(value: object, known: Collection[str]) -> Any:
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
        case np.generic():
            return described(value.item())
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
    """Returns the arguments with which a Keras object was made, and digests of user code in it.

    `get_config` is not used, because it serializes values, and Keras imports TensorFlow for that.
    """
    kind = cast("type[Any]", type(instance))
    given = {} if isinstance(instance, keras.Function | keras.Sequential) else _kept(instance)
    if keras_compat.is_of_user(kind):
        given = {name: value for name, value in given.items() if name not in OWN}
        given |= _functions(instance)
    return {"class": kind.__name__, **described(given, known), **of_class(kind)}


def _kept(instance: object) -> dict[str, Any]:
    kept, found = vars(instance), dict[str, Any]()
    is_own = keras_compat.is_of_user(type(instance))
    # Keras takes some arguments, such as `rms_scaling`, that its signatures do not name. So
    # attributes with plain values are described, too.
    others = () if is_own else (name for name in kept if name[0] != "_" and _is_setting(name, kept))
    for name in dict.fromkeys((*_parameters(type(instance)), *others)):
        value = kept.get(name, kept.get(f"_{name}", _MISSING))
        if isinstance(value, keras.Variable):
            value = _MISSING if len(value.shape) else _numpy(value).item()
        if value is _MISSING or (is_own and not _is_plain_or_of_keras(value)):
            continue
        found[name] = value
    if isinstance(instance, keras.layers.InputLayer):
        # The batch size is left out: in a model that is built from data, it may be the number of a
        # replica's rows, which may differ between workers.
        found = {**found, "batch_shape": (None, *instance.batch_shape[1:]), "input_tensor": None}
    if isinstance(instance, keras.Layer):
        found["dtype"] = instance.dtype_policy
        found["activity_regularizer"] = instance.activity_regularizer
    # The arguments that a loss or metric passes to the function that it wraps.
    options = kept.get(FUNCTION_ARGUMENTS.attribute)
    return {**found, "options": options} if isinstance(options, dict) and options else found


_MISSING = object()

# Arguments whose names end in this word set initial values. They are not compared, because all
# workers start with the chief's values.
_START = "initializer"


def _is_setting(name: str, kept: Mapping[str, Any]) -> bool:
    return type(kept[name]) in (bool, int, float, str) and name not in {"built", "training"}


def _is_plain_or_of_keras(value: object) -> bool:
    if isinstance(value, bool | int | float | str | tuple | None):
        return True
    return callable(getattr(value, "get_config", None))


def _parameters(kind: type) -> Iterator[str]:
    """Yields the names of the arguments that a class and its parents take."""
    for parent in kind.__mro__:
        made = vars(parent).get("__init__")
        if isinstance(made, FunctionType):
            own = inspect.unwrap(made).__code__
            named = own.co_varnames[1 : own.co_argcount + own.co_kwonlyargcount]
            yield from (name for name in named if name not in _OWN_FORM)


# Arguments that `_parameters` leaves out, because `_kept` and `_of_layer` add them.
_OWN_FORM = {"dtype", "trainable", "activity_regularizer"}


def _functions(instance: object) -> dict[str, Any]:
    """Returns the user-defined functions that a user-defined object has as attributes."""
    return {
        name: value
        for name, value in vars(instance).items()
        if isinstance(value, FunctionType)
        and keras_compat.is_of_user(value)
        and name not in _WRAPPED
    }


# Methods of a layer that Keras wraps and stores as attributes of the layer. `_functions` leaves
# these attributes out, because `of_class` already describes the methods.
_WRAPPED = frozenset({"build", "call", "quantize"})


ROWS = "checksum of rows"
"""The key of the checksum of an array's values, in the facts that `of_array` returns."""


def of_array(array: Any) -> dict[str, Any]:
    """Returns an array's shape and type, and a checksum of its rows in their order."""
    facts = {"shape": str(tuple(array.shape)), "dtype": str(array.dtype)}
    try:
        return {**facts, ROWS: _rows(array)}
    except Exception:  # noqa: BLE001  sparse, ragged or symbolic arrays
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
    if len(begins) > most:  # the first and the last block are always included
        begins = [begins[number * (len(begins) - 1) // (most - 1)] for number in range(most)]
    checksum = 0
    for begin in begins:
        checksum = checksum_of(_numpy(array[begin : begin + each]), checksum)
    return f"{checksum:08x}"


def _numpy(rows: object) -> np.ndarray[Any, Any]:
    return rows if isinstance(rows, np.ndarray) else np.asarray(keras.ops.convert_to_numpy(rows))


def _of_mapping(value: Mapping[Any, Any], known: Collection[str]) -> Any:
    return {
        str(name): described(inner, known)
        for name, inner in value.items()
        if name not in _LEFT_OUT and not str(name).endswith(_START)
    }


def _of_object(value: object, known: Collection[str]) -> Any:
    if isinstance(value, type):
        return cast("type[Any]", value).__name__
    if isinstance(value, FunctionType):
        facts = of_function(value)
        return described(facts) if len(facts) > 1 else facts["function"]
    if isinstance(value, MethodType):
        return {"method": value.__name__, **of_class(type(value.__self__))}
    if isinstance(value, functools.partial):
        made = cast("functools.partial[Any]", value)
        return {"partial": described(made.func), "given": described([made.args, made.keywords])}
    if len(getattr(value, "shape", ())) > 0 and getattr(value, "dtype", None) is not None:
        return of_array(value)
    wrapped = getattr(value, "__wrapped__", None)  # set if a framework has compiled the function
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
    own = (
        of_class(kind) if keras_compat.is_of_user(kind) and getattr(value, "__dict__", None) else {}
    )
    return {"class": kind.__name__, **own} if own else kind.__name__


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


# Among the facts that workers compare, digests of code have this key.
KEY = "code"

# Attributes and variables with these names may differ between workers, so they are not compared.
OWN = frozenset(
    {
        "chief",
        "device",
        "hostname",
        "index",
        "is_chief",
        "is_main",
        "local_rank",
        "log_dir",
        "name",
        "pid",
        "process_id",
        "process_index",
        "rank",
        "replica_id",
        "seed",
        "task_id",
        "task_index",
        "verbose",
        "worker",
        "worker_id",
        "worker_index",
    }
)


def of_function(function: FunctionType) -> dict[str, Any]:
    """Returns what determines a function's result: its code, and the plain values that it uses."""
    facts: dict[str, Any] = {"function": function.__name__}
    if keras_compat.is_of_user(function):
        facts[KEY] = _digest_of_code(function.__code__)
        values = {name: value for name, value in _used(function) if _is_compared(name, value)}
        facts.update({"uses": values} if values else {})
    return facts


def of_class(kind: type) -> dict[str, str]:
    """Returns a dict with a digest of a class's user-defined methods; {} if there are none."""
    parts = [
        f"{name} {_digest_of_code(function.__code__)}"
        for parent in kind.__mro__
        if keras_compat.is_of_user(parent)
        for name, function in sorted(_functions_of(parent))
    ]
    return {KEY: _digest("\n".join(parts).encode())} if parts else {}


def _is_compared(name: str, value: object) -> bool:
    if name.lower() in OWN or (isinstance(value, str) and ("/" in value or "\\" in value)):
        return False  # a path may differ between workers
    return isinstance(value, bool | int | float | str | None)


def _functions_of(kind: type) -> Iterator[tuple[str, FunctionType]]:
    for name, member in vars(kind).items():
        function = undecorated(member)
        if isinstance(function, FunctionType):
            yield name, function


def _used(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields the values of a function's defaults, closure and globals, each with its name."""
    code = function.__code__
    defaults = function.__defaults__ or ()
    parameters = code.co_varnames[: code.co_argcount][-len(defaults) :] if defaults else ()
    yield from zip(parameters, defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    yield from closure_of(function)
    for one in codes_in(code):
        for name in one.co_names:
            if name in function.__globals__ and name[:2] != "__":
                yield name, function.__globals__[name]


def closure_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields the name and value of each variable that a function closes over, if it is set."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # the variable is not set yet
            continue


def _digest_of_code(code: CodeType) -> str:
    constants = [
        _digest_of_code(constant)
        if isinstance(constant, CodeType)
        else repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)
        for constant in code.co_consts
    ]
    parts = (code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, constants)
    return _digest(repr(parts).encode())


# The attribute of a model that holds the arguments of `compile`. Keras does not track it.
_COMPILED = "_kerasdist_compiled"

# The attribute of a model that holds the facts that workers compared last; None after `compile`.
_COMPARED = "_kerasdist_compared"


def record_compile(model: keras.Model, given: Mapping[str, Any]) -> None:
    """Stores the arguments of `compile` on the model."""
    facts = {name: described(value) for name, value in given.items() if name != "optimizer"}
    object.__setattr__(model, _COMPILED, facts)
    object.__setattr__(model, _COMPARED, None)


def is_compared(model: keras.Model) -> bool:
    """Returns whether workers have compared the model since its last `compile`."""
    return vars(model).get(_COMPARED) is not None


def facts_of(model: Any, *, anew: bool) -> dict[str, Any]:
    """Returns the facts about a model that must be equal on all workers.

    If workers have already compared the model, returns the facts that they compared. With `anew`,
    the facts are determined again in any case.
    """
    known = vars(model).get(_COMPARED)
    return _facts(model) if known is None or anew else known


def mark_compared(model: keras.Model, facts: Mapping[str, Any]) -> None:
    """Records that all workers have compared the model and have found it equal."""
    object.__setattr__(model, _COMPARED, facts)


def _facts(model: keras.Model) -> dict[str, Any]:
    layers = keras_compat.flat_layers(model)
    classes = frozenset(type(layer).__name__ for layer in layers)
    wirings = [_wiring(one) for one in (model, *layers)]
    own = configuration(model, classes)
    return {
        "model": _named(model),
        **{name: facts for name, facts in own.items() if name != "class" and facts},
        "layers": [_of_layer(layer, classes) for layer in layers],
        "wiring": [wires for wires in wirings if wires],
        **_attributes(model),
        "compile": vars(model).get(_COMPILED, {}),
    }


def _of_layer(layer: keras.Layer, classes: frozenset[str]) -> dict[str, Any]:
    facts = {**configuration(layer, classes), "class": _named(layer)}
    return {"trainable": layer.trainable, **facts}


def _wiring(model: keras.Model) -> list[Any]:
    return [_of_call(*one) for one in keras_compat.wiring(model)]


def _of_call(operation: object, calls: list[Any]) -> Any:
    is_layer = isinstance(operation, keras.Layer)
    facts = {"class": _named(operation)} if is_layer else configuration(operation)
    return {**facts, "calls": described(calls)}


def _named(one: Any) -> str:
    """Returns an object's class, and its name if the user has chosen the name."""
    kind = type(one)
    own = not keras_compat.is_default_name(one.name, kind)
    return f"{kind.__name__} {one.name!r}" if own else kind.__name__


def _attributes(model: keras.Model) -> dict[str, Any]:
    """Returns the optimizers and losses that a model has as attributes for its `train_step`."""
    kept = {
        name: value
        for name, value in vars(model).items()
        if isinstance(value, keras.optimizers.Optimizer | keras.losses.Loss) and name[0] != "_"
    }
    known = set(map(id, kept.values()))
    others = [one for one in keras_compat.optimizers_of(model) if id(one) not in known]
    facts: dict[str, Any] = {name: configuration(value) for name, value in kept.items()}
    return facts | ({"optimizers": list(map(configuration, others))} if others else {})


_DATA = ("x", "y", "sample_weight", "validation_data")

# Arguments of `fit` and similar calls, and of callbacks, that do not affect training.
_ARGUMENTS_LEFT_OUT = frozenset({"self", "verbose"})
# All arguments of a call that `facts_of_call` either leaves out or describes in another way.
_OTHERS = _ARGUMENTS_LEFT_OUT | {"callbacks", "kwargs", "return_dict", *_DATA}


def facts_of_call(
    arguments: Mapping[str, Any], job: Job, kinds: tuple[type[Any], ...]
) -> dict[str, Any]:
    """Returns the facts about a call, such as of `fit`, that must be equal on all workers.

    `kinds` are the classes of callbacks that must be equal, because they change the training.
    """
    facts = {
        f"argument {name}": described(value)
        for name, value in arguments.items()
        if name not in _OTHERS
    }
    for name in _DATA:
        if arguments.get(name) is not None:
            facts[name] = of_data(arguments[name], job)
    if "callbacks" in arguments:
        facts["callbacks"] = [
            _of_callback(one)
            for one in keras_compat.callbacks_of(arguments["callbacks"])
            if isinstance(one, kinds)
        ]
    return facts


def of_data(data: Any, job: Job | None) -> Any:
    """Returns the facts about data that must be equal on all workers, and in a restarted job."""
    if isinstance(data, dict):
        return {str(name): of_data(one, job) for name, one in data.items()}
    if isinstance(data, list | tuple):
        if data and isinstance(data[0], bool | int | float | str):
            return of_array(np.asarray(data))
        return [of_data(one, job) for one in data]
    if isinstance(data, DistributedDataset):
        ours = equivalent(data)
        # For a backup, `job` is None. Then a divided dataset is described like its source, because
        # `distribute_dataset` may return the source itself if there is one replica.
        if job is None and isinstance(ours, DividedDataset):
            return of_data(ours.source, job)
        return type(ours).__name__
    if job is not None and shards_itself(data):
        return "a part of a tf.data.Dataset"
    kind = type(data).__name__
    if keras_compat.is_data_adapter(data):
        return "data of the same call"  # validation data, which `fit` passes to `evaluate`
    if keras_compat.is_tf_dataset(data):
        return {"class": "tf.data.Dataset", "element_spec": str(data.element_spec)}
    if keras_compat.is_torch_dataloader(data):
        return {"class": kind, "batch_size": data.batch_size, "drop_last": data.drop_last}
    if isinstance(data, keras_compat.PyDataset):
        return {"class": kind}
    if len(getattr(data, "shape", ())) > 0:
        return _of_rows(data)
    return described(data) if isinstance(data, bool | int | float | str | None) else kind


def _of_rows(data: Any) -> Any:
    if getattr(data, "dtype", None) is not None:
        return of_array(data)
    # The data are a pandas DataFrame.
    facts = {"class": type(data).__name__, "shape": str(tuple(data.shape))}
    try:
        return {**facts, **of_array(data.to_numpy())}
    except Exception:  # noqa: BLE001  a table may have columns that are not numbers
        return facts


def _of_callback(callback: keras.callbacks.Callback) -> dict[str, Any]:
    # LearningRateWarmup stores its arguments `target` and `start` in the attribute `_given`, so
    # this attribute is compared, too.
    given = {*inspect.signature(type(callback).__init__).parameters, "given"}
    own = {
        # Keras may change the sign of `min_delta` when the first epoch ends, so the sign is left
        # out.
        name: described(abs(value) if name == "min_delta" else value)
        for name, value in vars(callback).items()
        if name.removeprefix("_") in given and name not in _ARGUMENTS_LEFT_OUT
    }
    return {"class": type(callback).__name__, **own}
