"""Converts the state of callbacks and data sources to JSON and arrays, and back.

A value is converted to a *form*, which is JSON but may contain NumPy arrays. In a file, each array
of a form is replaced by the number of the array.

Pickle is not used, so reading a backup runs no code. Mutable values (lists, arrays, random
generators, objects) are restored by filling the object that the restarted script has made, so that
other code that refers to this object sees the restored value. But if the saved run had replaced the
script's list or array by another object, the restored value is a new object, too.

The *path* of a value is a text such as ``MyCallback.seen[0]``.
"""

from __future__ import annotations

import collections
import copy
import functools
import inspect
import json
import pathlib
import random
import sys
import types
import zlib
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import keras
import ml_dtypes
import numpy as np

from kerasdist import keras_compat
from kerasdist.agreement.description import closure_of
from kerasdist.agreement.results import checksum_of
from kerasdist.backends.base import random_states
from kerasdist.callbacks.chief_only import DelegatingCallback
from kerasdist.keras_compat import ops

_TAG = "kind"
_NUMBER = "number of an array"
_DEPTH = 6

_OF_KERAS = (keras.Variable, keras.Layer, keras.Metric, keras.optimizers.Optimizer)

_PLAIN = (bool, int, float, str, type(None))
_NUMBERS = "biufc"

# Types of code and of objects that the script makes again. A backup does not save such values.
_CODE = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    functools.partial,
    pathlib.PurePath,
)

Form = Any
"""A value as a backup stores it: JSON, and arrays."""

SKIPPED = {_TAG: "skipped"}
"""The form of a value that a backup leaves out, because it is not needed or cannot be saved."""

GONE = {_TAG: "gone"}
"""The form of an attribute that existed when `fit` began, and that was then deleted."""


@final
class Encoder:
    """Converts values to forms.

    Attributes:
        lost: The type of each value that cannot be saved; the keys are the paths of the values.
        filled: The values that can be restored in place, because a restarted script makes a value
            at the same path. For each value, a pair of its path and its id. If the value is neither
            a container nor an array, its type takes the place of its id.
        tied: Sets of names of attributes that refer to the same object. If one attribute of a set
            is saved, all attributes of the set are saved.
    """

    def __init__(
        self, leave_out: Sequence[object] = (), there: Container[tuple[str, object]] | None = None
    ) -> None:
        """Stores the objects to leave out, and which values can be restored in place.

        ``there`` tells which values existed when `fit` began: it is the attribute `filled` of an
        encoder that encoded the same objects at that time. If ``there`` is None, all values can be
        restored in place.
        """
        self.lost: dict[str, str] = {}
        self.filled: set[tuple[str, object]] = set()
        self.tied: set[frozenset[str]] = set()
        self._there = there
        self._attribute = ""
        self._is_state = False
        # Each value with its form, path and attribute, by the value's id. The values are kept,
        # because another object could get the id of a value that no longer exists.
        self._seen: dict[int, tuple[object, Form, str, str]] = {
            id(one): (one, SKIPPED, "", "") for one in leave_out
        }

    def held(self) -> list[object]:
        """Returns the values whose ids are in `filled`.

        The caller keeps these values, so that Python gives none of their ids to a new value.
        """
        return [value for value, *_ in self._seen.values()]

    def attributes(self, one: object) -> dict[str, Form]:
        """Returns the forms of an object's attributes, by name."""
        forms, name = {}, type(one).__name__
        for self._attribute, value in _values(one).items():
            forms[self._attribute] = self.encode(value, f"{name}.{self._attribute}")
        return forms

    def encode(self, value: object, where: str, depth: int = _DEPTH) -> Form:
        """Returns the form (JSON and arrays) of a value; `where` is the path of the value."""
        if type(value) in _PLAIN:
            return value
        if id(value) in self._seen:
            return self._refer_to(value, where)
        if isinstance(value, np.generic | np.ndarray):
            form = self._array(value, where)
            is_kept = isinstance(value, np.ndarray) and form is not SKIPPED
            return self._keep_form(value, where, form) if is_kept else form
        if isinstance(value, bytes):
            return {_TAG: "bytes", "value": np.frombuffer(value, np.uint8)}
        for kind in (list, tuple, set, frozenset, collections.deque):
            if type(value) is kind:
                items = sorted(value, key=repr) if kind in (set, frozenset) else value
                form: Form = {_TAG: kind.__name__}
                if isinstance(value, collections.deque):
                    form["maxlen"] = value.maxlen
                if kind not in (tuple, frozenset):
                    self._keep_form(value, where, form)
                form["items"] = [
                    one if type(one) in _PLAIN else self.encode(one, f"{where}[{i}]", depth)
                    for i, one in enumerate(items)
                ]
                return form
        if isinstance(value, dict):
            if type(value) is not dict and not self._is_there(value, where):
                return SKIPPED
            form = self._keep_form(value, where, {_TAG: "dict"})
            form["items"] = [
                [self.encode(key, where, depth), self.encode(one, f"{where}[{key!r}]", depth)]
                for key, one in value.items()
            ]
            return form
        return self._object(value, where, depth)

    def _keep_form(self, value: object, where: str, form: Form) -> Form:
        """Records a value and its form.

        If the value did not exist when `fit` began, its form is marked as new.
        """
        one = where, id(value)
        self.filled.add(one)
        self._seen[id(value)] = value, form, where, self._attribute
        if not (self._there is None or self._is_state or one in self._there):
            form["new"] = True
        return form

    def _refer_to(self, value: object, where: str) -> Form:
        """Returns the form of one more reference to a value that already has a form."""
        self.filled.add((where, id(value)))
        _, form, first, attribute = self._seen[id(value)]
        if form is SKIPPED:
            return form
        if attribute != self._attribute:
            self.tied.add(frozenset((attribute, self._attribute)))
        return {_TAG: "same", "as": form.setdefault("named", first)}

    def _state(self, state: object, where: str, depth: int = _DEPTH) -> Form:
        """Returns the form of a state made only to be saved, such as the result of `state_dict()`.

        No value of the script is filled with this state, so its form is never marked as new.
        """
        before, self._is_state = self._is_state, True
        form = self.encode(state, where, depth)
        self._is_state = before
        return form

    def _is_there(self, value: object, where: str) -> bool:
        """Returns whether the script itself makes a value of this type at this path.

        Only then can the value be restored, by filling the script's value. An object of Keras must
        also have the same number of variables: an optimizer, for example, gets its variables only
        in its first update.
        """
        count = len(_variables(value)) if isinstance(value, _OF_KERAS) else None
        one = where, (type(value), count)
        self.filled.add(one)
        if self._there is None or one in self._there:
            return True
        self.lost[where] = type(value).__name__
        return False

    def _object(self, value: object, where: str, depth: int) -> Form:
        if isinstance(value, _CODE):
            return SKIPPED
        state = _state_of_torch(value)
        is_tensor = ops.is_tensor(value) or isinstance(state, np.ndarray)
        if not is_tensor and not self._is_there(value, where):
            return SKIPPED
        form: Form = {}
        self._seen[id(value)] = value, form, where, self._attribute
        form |= self._of_object(value, state, where, depth)
        return SKIPPED if form == SKIPPED else form

    def _of_object(self, value: Any, state: object, where: str, depth: int) -> Form:
        # a tensor of TensorFlow or JAX, or one of PyTorch that is not on the CPU
        if ops.is_tensor(value) and not getattr(value, "is_cpu", False):
            return {_TAG: "tensor", "value": self._array(ops.convert_to_numpy(value), where)}
        if isinstance(value, np.random.Generator):
            return {_TAG: "numpy", "state": self._state(value.bit_generator.state, where)}
        if isinstance(value, np.random.RandomState | random.Random):
            return {_TAG: "random", "state": self._state(value.__getstate__(), where)}
        if isinstance(value, _OF_KERAS):
            values = [ops.convert_to_numpy(variable) for variable in _variables(value)]
            return {_TAG: "variables", "values": [self._array(one, where) for one in values]}
        if keras_compat.loads_state(value):
            return {_TAG: "state_dict", "state": self._state(value.state_dict(), where, depth)}
        if state is not None:
            return {_TAG: "torch", "state": self._state(state, where)}
        if depth and _is_of_python(value):
            attributes = {
                name: self.encode(one, f"{where}.{name}", depth - 1)
                for name, one in vars(value).items()
            }
            return {_TAG: "object", "attributes": attributes}
        self.lost[where] = type(value).__name__
        return SKIPPED

    def _array(self, value: object, where: str) -> Form:
        array = np.asarray(value)
        if array.dtype.kind not in _NUMBERS and array.dtype.name not in vars(ml_dtypes):
            if array.dtype.kind in "US":
                return {_TAG: "words", "dtype": array.dtype.str, "items": array.tolist()}
            self.lost[where] = f"array of {array.dtype}"
            return SKIPPED
        kind = "scalar" if isinstance(value, np.generic) else "array"
        return {_TAG: kind, "value": array}


def _state_of_torch(value: Any) -> str | np.ndarray | None:
    """Converts a PyTorch generator to text, and a dense tensor to an array; otherwise None."""
    if keras_compat.is_any_of(value, "torch", "Generator"):
        return random_states.text_of(value.get_state())
    if not keras_compat.is_any_of(value, "torch", "Tensor") or value.is_meta:
        return None
    is_dense = value.layout is sys.modules["torch"].strided
    return value.detach().cpu().numpy() if is_dense else None


def digest(form: object) -> int:
    """Returns a checksum of a form; the forms of equal values have equal checksums."""
    return zlib.crc32(json.dumps(form, default=_checksum).encode())


def _checksum(array: np.ndarray) -> list[object]:
    return [array.dtype.name, list(array.shape), checksum_of(array)]


def numbered(form: object, arrays: list[np.ndarray]) -> Any:
    """Returns a form as JSON: each array is appended to `arrays` and replaced by its number."""

    def number(array: np.ndarray) -> dict[str, int]:
        arrays.append(array)
        return {_NUMBER: len(arrays) - 1}

    return json.loads(json.dumps(form, default=number))


def filled(form: object, arrays: Sequence[np.ndarray | None]) -> Any:
    """Undoes `numbered`: returns the form with arrays instead of their numbers."""

    def fill(one: dict[str, Any]) -> Any:
        return arrays[one[_NUMBER]] if _NUMBER in one else one

    return json.loads(json.dumps(form), object_hook=fill)


def decode(form: object, current: object = None, named: dict[str, Any] | None = None) -> Any:
    """Converts a form back to a value.

    `current` is the value that the script itself has made. If possible, this value is filled with
    the content of the form, and returned.

    ``named`` contains values to which several attributes of an object refer. Its keys are the paths
    at which these values were found first.
    """
    if not isinstance(form, dict):
        return form
    named = {} if named is None else named
    kind = form[_TAG]
    if kind == "skipped":
        return current
    if kind == "same":
        return named.get(form["as"], current)
    if kind in ("tuple", "frozenset"):
        return _CONTAINERS[kind](_items(form, current, named))
    value = _prepare_value(form, kind, current, named)
    if "named" in form:
        named[form["named"]] = value
    if kind == "dict":
        now = dict(current) if isinstance(current, dict) else {}
        keys = [(decode(key, None, named), one) for key, one in form["items"]]
        items = [
            (key, decode(one, now.get(key), named))
            for key, one in keys
            if one != SKIPPED or key in now
        ]
        value.clear()
        value.update(items)
    elif kind in _CONTAINERS:
        items = _items(form, current, named)
        value.clear()
        (value.update if kind == "set" else value.extend)(items)
    elif kind == "object":
        set_attributes(value, form["attributes"], named)
    return value


def _items(form: Form, current: object, named: dict[str, Any]) -> list[Any]:
    now = list(current) if isinstance(current, list | tuple | collections.deque) else []
    forms = [one for index, one in enumerate(form["items"]) if one != SKIPPED or index < len(now)]
    now += [None] * (len(forms) - len(now))
    return [decode(one, at, named) for one, at in zip(forms, now, strict=False)]


def _prepare_value(form: Form, kind: str, current: object, named: dict[str, Any]) -> Any:
    """Returns the list, dict or other object that `decode` then fills with the items of a form.

    For other forms, such as those of arrays and random generators, the result is the restored value
    itself.
    """
    if "new" in form and isinstance(current, _FILLED):
        current = copy.copy(current)
    if kind == "dict":
        return current if isinstance(current, dict) else {}
    if kind in ("list", "set", "deque"):
        longest = form.get("maxlen")
        if type(current) is _CONTAINERS[kind] and getattr(current, "maxlen", None) == longest:
            return current
        return collections.deque(maxlen=longest) if kind == "deque" else _CONTAINERS[kind]()
    if kind in ("array", "words"):
        return _array(form, current)
    if kind == "scalar":
        return form["value"][()]
    if kind == "bytes":
        return form["value"].tobytes()
    return _restored(form, kind, current, named)


def _array(form: Form, current: Any = None) -> np.ndarray:
    array = np.array(form["items"], form["dtype"]) if form[_TAG] == "words" else form["value"]
    is_alike = isinstance(current, np.ndarray) and current.flags.writeable
    if is_alike and (current.dtype, current.shape) == (array.dtype, array.shape):
        current[...] = array
        return current
    return array.copy()


def _restored(form: Form, kind: str, current: Any, named: dict[str, Any]) -> Any:
    if kind == "numpy":
        current.bit_generator.state = decode(form["state"], None, named)
    elif kind == "random":
        current.__setstate__(decode(form["state"], None, named))
    elif kind == "variables":
        for variable, value in zip(_variables(current), form["values"], strict=True):
            variable.assign(_array(value))
    elif kind == "torch":
        torch, state = sys.modules.get("torch"), decode(form["state"], None, named)
        if torch is None:
            raise ValueError("the backup has a value of PyTorch, which is not imported")
        if not isinstance(state, str):
            return torch.from_numpy(np.array(state))
        current.set_state(random_states.state_of(state))
    elif kind == "tensor":
        return ops.convert_to_tensor(_array(form["value"]))
    elif kind == "state_dict":
        current.load_state_dict(decode(form["state"], None, named))
    return current


def set_attributes(
    value: object, forms: dict[str, Any], named: dict[str, Any] | None = None
) -> None:
    """Sets the attributes of an object to the values of their forms."""
    own, named = vars(value), {} if named is None else named
    for name, form in forms.items():
        if form == GONE:
            own.pop(name, None)
        elif form != SKIPPED:
            own[name] = decode(form, own.get(name), named)


def _variables(value: Any) -> Sequence[Any]:
    return [value] if isinstance(value, keras.Variable) else value.variables


def _is_of_python(value: object) -> bool:
    """Returns whether an object's attributes are its whole state.

    This is assumed if the object's type has Python's default `__reduce_ex__`, by which `copy` and
    `pickle` read an object, and if this method accepts the object.
    """
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


# Types of values that are filled in place when a backup is restored.
_FILLED = (list, dict, set, collections.deque, np.ndarray)
_MUTABLE = (*_FILLED, bytearray, np.random.Generator, np.random.RandomState, random.Random)

# Attributes that Keras and the base class of callbacks set. A backup leaves them out.
_OF_THE_CALL = frozenset(("params", "_model", "validation_data"))

# A backup leaves out the attributes in `_OF_MONITOR` and `_OF_CSV`. Keras's callbacks compute those
# in `_OF_MONITOR` from their arguments when the first epoch ends (`_set_monitor_op` changes
# `min_delta`). Those in `_OF_CSV` belong to an open file. Of the attributes of the callback
# TensorBoard, a backup saves only those in `_COUNTS_OF_TENSORBOARD`.
_OF_MONITOR = frozenset(("monitor_op", "min_delta"))
_OF_CSV = frozenset(("csv_file", "writer", "append_header"))
_COUNTS_OF_TENSORBOARD = ("_global_train_batch", "_global_test_batch", "_previous_epoch_iterations")


@final
class _Watched:
    """An object, and checksums of its attributes from the time before anything was restored.

    Attributes:
        object: The object.
        lost: The type of each value that the newest backup cannot restore, by the value's path.
    """

    def __init__(self, one: object, elsewhere: Sequence[object]) -> None:
        """Stores the checksums; ignores the objects in `elsewhere`, which are saved separately."""
        self.object, self._elsewhere = one, elsewhere
        self.lost: Mapping[str, str] = {}
        first = Encoder(elsewhere)
        self._at_begin = {key: digest(form) for key, form in first.attributes(one).items()}
        # The old values are kept alive, because a new value could get the id of a deleted one.
        self._there, self._held = first.filled, first.held()

    def changes(self) -> dict[str, Form]:
        """Returns the forms of the attributes that have changed."""
        begin, encoder = self._at_begin, Encoder(self._elsewhere, self._there)
        forms = encoder.attributes(self.object)
        self.lost = encoder.lost
        # The content of a CSVLogger's file is always saved: the file may have lines of an earlier
        # process, which the script does not write again.
        changed = {
            key for key, form in forms.items() if key == _CONTENT or begin.get(key) != digest(form)
        }
        while more := {one for tied in encoder.tied if changed & tied for one in tied} - changed:
            changed |= more
        kept = {key: form for key, form in forms.items() if key in changed}
        return kept | dict.fromkeys(begin.keys() - forms.keys(), GONE)


@final
class Remembering:
    """For objects such as callbacks, saves the attributes that have changed since `fit` began.

    After a restart the script itself sets all other attributes. So backups stay small, and
    attributes that differ between processes, such as a start time, keep the new process's values.

    Attributes:
        has_changed: Whether the last call of `state` has found a changed attribute.
    """

    has_changed = False

    def __init__(self, objects: Sequence[object], elsewhere: Sequence[object] = ()) -> None:
        """Stores the objects, and checksums of their attributes before anything is restored.

        The objects in `elsewhere` are left out, because backups save them separately.
        """
        own = [one.inner if isinstance(one, DelegatingCallback) else one for one in objects]
        self._watched = [_Watched(one, [*elsewhere, *own]) for one in own]

    def state(self) -> list[list[Form]]:
        """Returns the name of each object, and the forms of its changed attributes."""
        states = [[_named(one.object), one.changes()] for one in self._watched]
        self.has_changed = any(changes for _, changes in states)
        return states

    def put_back(self, forms: Sequence[Any]) -> None:
        """Restores the attributes of the objects from the result of `state`."""
        left = list(forms)
        for one in (each.object for each in self._watched):
            kept = next((form for form in left if form[0] == _named(one)), None)
            if kept is not None:
                left.remove(kept)
                _put_back(one, kept[1])

    def lost(self) -> list[str]:
        """Returns a line of text for each value that the result of `state` cannot restore."""
        lines = []
        for one in self._watched:
            lines += _closures(one.object)
            if keras_compat.is_builtin(type(one.object)):
                lines += _lines_elsewhere(one.object)
                continue
            lines += [f"{where} ({kind})" for where, kind in one.lost.items()]
        return lines


_STATE_DICT, _CONTENT = "state_dict()", "content of the file"


def _named(one: object) -> str:
    """Returns a name for an object: its class, and the log that it monitors if it is a callback."""
    return f"{type(one).__name__} {getattr(one, 'monitor', '')}"


def _values(callback: Any) -> Mapping[str, object]:
    """Returns those of an object's attributes that a backup may save, by name."""
    if keras_compat.loads_state(callback):
        return {_STATE_DICT: callback.state_dict()}
    try:
        own = dict(vars(callback))
    except TypeError:  # an object without attributes
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
    if isinstance(callback, keras.callbacks.ModelCheckpoint) and forms.get("best") is not None:
        keras_compat.choose_comparison(callback)


def _write_again(logger: Any, content: bytes) -> None:
    """Rewrites a CSVLogger's file with the lines of the backup."""
    logger.csv_file.close()
    file = Path(logger.filename)
    file.write_bytes(content)
    logger.csv_file = file.open("a")
    logger.writer, logger.append_header = None, not content


def _lines_elsewhere(callback: object) -> list[str]:
    """Returns a line of text about a CSVLogger's file if this machine lacks the file, else []."""
    if not isinstance(callback, keras.callbacks.CSVLogger) or callback.csv_file is None:
        return []
    is_here = Path(callback.filename).is_file()
    return [] if is_here else [f"{type(callback).__name__}: the lines of {callback.filename}"]


def _closures(callback: object) -> list[str]:
    """Returns a line for each mutable variable that a LambdaCallback's functions close over."""
    found = {}
    if not isinstance(callback, keras.callbacks.LambdaCallback):
        return []
    for hook in filter(inspect.isfunction, vars(callback).values()):
        for name, value in closure_of(hook):
            if isinstance(value, _MUTABLE):
                found[f"{type(callback).__name__}: {name} ({type(value).__name__})"] = None
    return list(found)
