"""What callbacks and data sources remember, as JSON and arrays.

A value has a form: JSON, but for NumPy arrays in it. A file has numbers in their places.

Without pickle: reading a backup runs no code. Mutable values (lists, random generators, objects)
are filled in place, so that other objects that hold them see the restored value.
"""

from __future__ import annotations

import collections
import functools
import inspect
import json
import pathlib
import random
import types
import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import keras
import ml_dtypes
import numpy as np

from kerasdist import keras_compat
from kerasdist.agreement.description import closure_of
from kerasdist.agreement.results import checksum_of
from kerasdist.backends import registry
from kerasdist.callbacks.chief_only import DelegatingCallback
from kerasdist.keras_compat import ops

_TAG = "kind"
_NUMBER = "number of an array"
_DEPTH = 6

_OF_KERAS = (keras.Variable, keras.Layer, keras.Metric, keras.optimizers.Optimizer)

_PLAIN = (bool, int, float, str, type(None))
_NUMBERS = "biufc"

# Code, and objects that the script makes again: a backup keeps nothing of them.
_CODE = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    functools.partial,
    pathlib.PurePath,
)

SKIPPED = {_TAG: "skipped"}
"""The form of what is not kept, and need not be."""


@final
class Encoder:
    """Turns values into forms.

    Attributes:
        lost: Place and type of each value that cannot be kept.
        filled: Place and type of each value that is restored by filling the one of the script.
    """

    def __init__(
        self, leave_out: Sequence[object] = (), there: Container[tuple[str, type]] | None = None
    ) -> None:
        """Takes what is kept elsewhere, and which values to fill a script makes; None: all."""
        self.lost: dict[str, str] = {}
        self.filled: set[tuple[str, type]] = set()
        self._there = there
        self._seen = {id(one): one for one in leave_out}  # as long as they live, so do their ids

    def encode(self, value: object, where: str, depth: int = _DEPTH) -> Any:
        """Returns the form of a value."""
        if type(value) in _PLAIN:
            return value
        if isinstance(value, np.generic | np.ndarray):
            return self._array(value, where)
        if isinstance(value, bytes):
            return {_TAG: "bytes", "value": np.frombuffer(value, np.uint8)}
        for kind in (list, tuple, set, frozenset, collections.deque):
            if type(value) is kind:
                items = sorted(value, key=repr) if kind in (set, frozenset) else value
                forms = [
                    one if type(one) in _PLAIN else self.encode(one, f"{where}[{i}]", depth)
                    for i, one in enumerate(items)
                ]
                return {_TAG: kind.__name__, "items": forms}
        if isinstance(value, dict):
            if type(value) is not dict and not self._is_there(value, where):
                return SKIPPED
            return {
                _TAG: "dict",
                "items": [
                    [self.encode(key, where, depth), self.encode(one, f"{where}[{key!r}]", depth)]
                    for key, one in value.items()
                ],
            }
        return self._object(value, where, depth)

    def _is_there(self, value: object, where: str) -> bool:
        """Returns whether the script makes a value of this type here, to be filled."""
        one = where, type(value)
        self.filled.add(one)
        if self._there is None or one in self._there:
            return True
        self.lost[where] = type(value).__name__
        return False

    def _object(self, value: Any, where: str, depth: int) -> Any:
        if isinstance(value, _CODE) or id(value) in self._seen:
            return SKIPPED
        self._seen[id(value)] = value
        if ops.is_tensor(value) and not getattr(value, "is_cpu", False):  # where PyTorch has it
            return {_TAG: "tensor", "value": self._array(ops.convert_to_numpy(value), where)}
        torch = registry.torch_states()
        state = None if torch is None else torch.kept(value)
        if not isinstance(state, np.ndarray) and not self._is_there(value, where):
            return SKIPPED
        if isinstance(value, np.random.Generator):
            return {_TAG: "numpy", "state": self.encode(value.bit_generator.state, where)}
        if isinstance(value, np.random.RandomState | random.Random):
            return {_TAG: "random", "state": self.encode(value.__getstate__(), where)}
        if isinstance(value, _OF_KERAS):
            values = [ops.convert_to_numpy(variable) for variable in _variables(value)]
            return {_TAG: "variables", "values": [self._array(one, where) for one in values]}
        if keras_compat.loads_state(value):
            return {_TAG: "state_dict", "state": self.encode(value.state_dict(), where, depth)}
        if state is not None:
            return {_TAG: "torch", "state": self.encode(state, where)}
        if depth and _is_of_python(value):
            attributes = {
                name: self.encode(one, f"{where}.{name}", depth - 1)
                for name, one in vars(value).items()
            }
            return {_TAG: "object", "attributes": attributes}
        self.lost[where] = type(value).__name__
        return SKIPPED

    def _array(self, value: object, where: str) -> Any:
        array = np.asarray(value)
        if array.dtype.kind not in _NUMBERS and array.dtype.name not in vars(ml_dtypes):
            if array.dtype.kind in "US":
                return {_TAG: "words", "dtype": array.dtype.str, "items": array.tolist()}
            self.lost[where] = f"array of {array.dtype}"
            return SKIPPED
        kind = "scalar" if isinstance(value, np.generic) else "array"
        return {_TAG: kind, "value": array}


def digest(form: object) -> int:
    """Returns a number that is equal for the forms of equal values."""
    return zlib.crc32(json.dumps(form, default=_checksum).encode())


def _checksum(array: np.ndarray) -> list[object]:
    return [array.dtype.name, list(array.shape), checksum_of(array)]


def numbered(form: object, arrays: list[np.ndarray]) -> Any:
    """Returns a form as JSON; its arrays are added to `arrays`, and numbers stand for them."""

    def number(array: np.ndarray) -> dict[str, int]:
        arrays.append(array)
        return {_NUMBER: len(arrays) - 1}

    return json.loads(json.dumps(form, default=number))


def filled(form: object, arrays: Sequence[np.ndarray | None]) -> Any:
    """Returns the form of which `numbered` has made this one."""

    def fill(one: dict[str, Any]) -> Any:
        return arrays[one[_NUMBER]] if _NUMBER in one else one

    return json.loads(json.dumps(form), object_hook=fill)


def decode(form: object, current: object = None) -> Any:
    """Decodes a form; a mutable value is restored by filling the current one in place."""
    if not isinstance(form, dict):
        return form
    kind = form[_TAG]
    if kind == "skipped":
        return current
    if kind in ("array", "scalar"):
        return _array(form)
    if kind == "words":
        return np.array(form["items"], np.dtype(form["dtype"]))
    if kind == "bytes":
        return form["value"].tobytes()
    if kind == "dict":
        return _dict(form, current)
    if kind in _CONTAINERS:
        return _container(form, current)
    return _restored(form, kind, current)


def _array(form: Any) -> Any:
    array = form["value"]
    return array[()] if form[_TAG] == "scalar" else array.copy()


def _dict(form: Any, current: Any) -> Any:
    now = current if isinstance(current, dict) else {}
    keys = [(decode(key), inner) for key, inner in form["items"]]
    items = [(key, decode(one, now.get(key))) for key, one in keys if one != SKIPPED or key in now]
    now.clear()
    now.update(items)
    return now


def _container(form: Any, current: Any) -> Any:
    kind = _CONTAINERS[form[_TAG]]
    is_alike = type(current) is kind
    now = list(current) if is_alike and kind in (list, tuple, collections.deque) else []
    forms = [one for index, one in enumerate(form["items"]) if one != SKIPPED or index < len(now)]
    now += [None] * (len(forms) - len(now))
    items = [decode(one, at) for one, at in zip(forms, now, strict=False)]
    if not is_alike or kind in (tuple, frozenset):
        return kind(items)
    current.clear()
    (current.update if kind is set else current.extend)(items)
    return current


def _restored(form: Any, kind: str, current: Any) -> Any:
    if kind == "numpy":
        current.bit_generator.state = decode(form["state"])
    elif kind == "random":
        current.__setstate__(decode(form["state"]))
    elif kind == "variables":
        for variable, value in zip(_variables(current), form["values"], strict=True):
            variable.assign(_array(value))
    elif kind == "torch":
        torch = registry.torch_states()
        if torch is None:
            raise ValueError("PyTorch, of which a generator or a tensor is kept, is not imported")
        return torch.put_back(decode(form["state"]), current)
    elif kind == "tensor":
        return ops.convert_to_tensor(_array(form["value"]))
    elif kind == "state_dict":
        current.load_state_dict(decode(form["state"]))
    else:
        set_attributes(current, form["attributes"])
    return current


def set_attributes(value: object, forms: dict[str, Any]) -> None:
    """Restores the attributes of an object."""
    own = vars(value)
    for name, form in forms.items():
        if form != SKIPPED:
            own[name] = decode(form, own.get(name))


def _variables(value: Any) -> Sequence[Any]:
    return [value] if isinstance(value, keras.Variable) else value.variables


def _is_of_python(value: object) -> bool:
    """Returns whether an object is nothing but its attributes, as `copy` decides it."""
    kind = type(value)
    if kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ is not object.__reduce_ex__:
        return False
    try:
        object.__reduce_ex__(value, 2)
        return isinstance(vars(value), dict)
    except (TypeError, AttributeError):
        return False


_CONTAINERS: dict[str, Any] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, collections.deque)
}


_MUTABLE = (list, dict, set, bytearray, np.ndarray, np.random.Generator, np.random.RandomState)

# Attributes that Keras and the base class of callbacks set.
_OF_THE_CALL = frozenset(("params", "_model", "validation_data"))

# Attributes of Keras's callbacks that follow from their arguments at the first epoch's end
# (`_set_monitor_op` changes the sign of `min_delta`), and handles of open files.
_OF_MONITOR = frozenset(("monitor_op", "min_delta"))
_OF_CSV = frozenset(("csv_file", "writer", "append_header"))
_COUNTS_OF_TENSORBOARD = ("_global_train_batch", "_global_test_batch", "_previous_epoch_iterations")


@final
class Remembering:
    """Keeps the attributes of some objects that have changed since `fit` began.

    The script sets all others again. So little is kept, and attributes that differ by process, such
    as a start time, stay those of the new process.

    Attributes:
        has_changed: Whether the newest state has an attribute.
    """

    has_changed = False

    def __init__(self, objects: Sequence[object], elsewhere: Sequence[object] = ()) -> None:
        """Takes the objects before anything is restored."""
        self._objects = [
            one.inner if isinstance(one, DelegatingCallback) else one for one in objects
        ]
        self._elsewhere = [*elsewhere, *self._objects]
        self._there: list[Container[tuple[str, type]] | None] = [None] * len(self._objects)
        self._lost: list[Mapping[str, str]] = []
        self._at_begin: list[dict[str, int]] = []
        for forms, encoder in self._encoded():
            self._at_begin.append({key: digest(form) for key, form in forms.items()})
            self._there[len(self._at_begin) - 1] = encoder.filled

    def _encoded(self) -> Iterator[tuple[dict[str, Any], Encoder]]:
        """Yields the forms of each object's values, by name, and what has encoded them."""
        for one, there in zip(self._objects, self._there, strict=True):
            encoder, name = Encoder(self._elsewhere, there), type(one).__name__
            values = _values(one).items()
            yield {key: encoder.encode(value, f"{name}.{key}") for key, value in values}, encoder

    def state(self) -> list[object]:
        """Returns a form for each object."""
        states: list[object] = []
        self._lost, self.has_changed = [], False
        for one, begin, (forms, encoder) in zip(
            self._objects, self._at_begin, self._encoded(), strict=True
        ):
            # The file has lines of the previous process, which the script does not write again.
            changed = [
                key
                for key, form in forms.items()
                if key == _CONTENT or begin.get(key) != digest(form)
            ]
            states.append([type(one).__name__, {key: forms[key] for key in changed}])
            self.has_changed |= bool(changed)
            self._lost.append(encoder.lost)
        return states

    def put_back(self, forms: Sequence[Any]) -> None:
        """Restores the attributes of the objects."""
        left = list(forms)
        for one in self._objects:
            kept = next((form for form in left if form[0] == type(one).__name__), None)
            if kept is not None:
                left.remove(kept)
                _put_back(one, kept[1])

    def lost(self) -> list[str]:
        """Returns what the newest state cannot bring back, a line each."""
        lines = []
        for one, lost in zip(self._objects, self._lost, strict=False):
            lines += _closures(one)
            if keras_compat.is_builtin(type(one)):
                lines += _lines_elsewhere(one)
                continue
            lines += [f"{where} ({kind})" for where, kind in lost.items()]
        return lines


_STATE_DICT, _CONTENT = "state_dict()", "content of the file"


def _values(callback: Any) -> Mapping[str, object]:
    """Returns the attributes of a callback, by name."""
    if keras_compat.loads_state(callback):
        return {_STATE_DICT: callback.state_dict()}
    try:
        own = dict(vars(callback))
    except TypeError:  # it has none
        return {}
    if not isinstance(callback, keras.callbacks.Callback):
        return own
    left_out = set(_OF_THE_CALL)
    if isinstance(callback, keras.callbacks.TensorBoard):
        return {name: own[name] for name in _COUNTS_OF_TENSORBOARD}
    if keras_compat.is_builtin(type(callback)):
        left_out |= set(inspect.signature(type(callback).__init__).parameters)
    if "monitor_op" in own:
        left_out |= _OF_MONITOR
    extra = {}
    if isinstance(callback, keras.callbacks.CSVLogger):
        left_out |= _OF_CSV
        file = Path(callback.filename)
        if callback.csv_file is not None and file.is_file():
            extra[_CONTENT] = file.read_bytes()
    return {**{name: one for name, one in own.items() if name not in left_out}, **extra}


def _put_back(callback: Any, forms: dict[str, Any]) -> None:
    forms = dict(forms)
    if _STATE_DICT in forms:
        callback.load_state_dict(decode(forms.pop(_STATE_DICT)))
        return
    content = forms.pop(_CONTENT, None)
    set_attributes(callback, forms)
    if content is not None and callback.csv_file is not None:
        _write_again(callback, decode(content))


def _write_again(logger: Any, content: bytes) -> None:
    """Rewrites a CSVLogger's file with the lines of the backup."""
    logger.csv_file.close()
    file = Path(logger.filename)
    file.write_bytes(content)
    logger.csv_file = file.open("a")
    logger.writer, logger.append_header = None, not content


def _lines_elsewhere(callback: object) -> list[str]:
    """Returns the file of a CSVLogger that is not on this machine."""
    if not isinstance(callback, keras.callbacks.CSVLogger) or callback.csv_file is None:
        return []
    is_here = Path(callback.filename).is_file()
    return [] if is_here else [f"{type(callback).__name__}: the lines of {callback.filename}"]


def _closures(callback: object) -> list[str]:
    """Returns the variables that the functions of a LambdaCallback close over."""
    found = {}
    if not isinstance(callback, keras.callbacks.LambdaCallback):
        return []
    for hook in vars(callback).values():
        if not inspect.isfunction(hook) or keras_compat.is_builtin(hook):
            continue
        for name, value in closure_of(hook):
            if isinstance(value, _MUTABLE):
                found[f"{type(callback).__name__}: {name} ({type(value).__name__})"] = None
    return list(found)
