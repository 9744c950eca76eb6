"""The state of callbacks and data sources that a restarted run needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import keras
import numpy as np

from kerasdist import keras_compat
from kerasdist.callbacks.delegating import DelegatingCallback
from kerasdist.callbacks.encoding import Encoder, HasStateDict, decode, digests, set_attributes

_MUTABLE = (list, dict, set, bytearray, np.ndarray, np.random.Generator, np.random.RandomState)

# Attributes that Keras and the base class of callbacks set.
_OF_THE_CALL = frozenset(("params", "_model", "validation_data"))

# Attributes of Keras's callbacks that follow from their arguments at the first epoch's end
# (`_set_monitor_op` changes the sign of `min_delta`), and handles of open files.
_OF_MONITOR = frozenset(("monitor_op", "min_delta"))
_OF_CSV = frozenset(("csv_file", "writer", "append_header"))
_COUNTS_OF_TENSORBOARD = (
    "_global_train_batch",
    "_global_test_batch",
    "_previous_epoch_iterations",
)


@final
class Remembering:
    """Keeps the attributes of some objects that have changed since `fit` began.

    The script sets all others again. So little is kept, and attributes that differ by process, such
    as a start time, stay those of the new process.
    """

    def __init__(self, objects: Sequence[Any], elsewhere: Sequence[Any] = ()) -> None:
        """Takes the objects before anything is restored."""
        self._objects = [
            one.inner if isinstance(one, DelegatingCallback) else one for one in objects
        ]
        self._elsewhere = [*elsewhere, *self._objects]
        self._at_begin = [digests(_values(one), self._elsewhere) for one in self._objects]

    def state(self, first_array: int) -> tuple[list[Any], list[np.ndarray[Any, Any]]]:
        """Returns a form for each object, and the arrays that the forms name."""
        encoder = Encoder(first_array, self._elsewhere)
        forms = []
        for one, begin in zip(self._objects, self._at_begin, strict=True):
            name, values = type(one).__name__, _values(one)
            now = digests(values, self._elsewhere)
            # The file has lines of the previous process, which the script does not write again.
            changed = [key for key in values if key == _CONTENT or begin.get(key) != now[key]]
            own = {key: encoder.encode(values[key], f"{name}.{key}") for key in changed}
            forms.append([name, own])
        return forms, encoder.arrays

    def put_back(self, forms: Sequence[Any], arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        """Restores the attributes of the objects."""
        left = list(forms)
        for one in self._objects:
            kept = next((form for form in left if form[0] == type(one).__name__), None)
            if kept is not None:
                left.remove(kept)
                _put_back(one, kept[1], arrays)

    def lost(self) -> list[str]:
        """Returns what a backup cannot bring back, a line each."""
        lines = []
        for one in self._objects:
            lines += _closures(one)
            if keras_compat.is_builtin(type(one)):
                lines += _lines_elsewhere(one)
                continue
            name, encoder = type(one).__name__, Encoder(leave_out=self._elsewhere)
            for key, value in _values(one).items():
                encoder.encode(value, f"{name}.{key}")
            lines += [f"{where} ({kind})" for where, kind in encoder.lost.items()]
        return lines


_STATE_DICT, _CONTENT = "state_dict()", "content of the file"


def _values(callback: Any) -> Mapping[str, Any]:
    """Returns the attributes of a callback, by name."""
    if isinstance(callback, HasStateDict):
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


def _put_back(callback: Any, forms: dict[str, Any], arrays: Sequence[Any]) -> None:
    forms = dict(forms)
    if _STATE_DICT in forms:
        callback.load_state_dict(decode(forms.pop(_STATE_DICT), arrays))
        return
    content = forms.pop(_CONTENT, None)
    set_attributes(callback, forms, arrays)
    if content is not None and callback.csv_file is not None:
        _write_again(callback, decode(content, arrays))


def _write_again(logger: Any, content: bytes) -> None:
    """Rewrites a CSVLogger's file with the lines of the backup."""
    logger.csv_file.close()
    file = Path(logger.filename)
    file.write_bytes(content)
    logger.csv_file = file.open("a")
    logger.writer, logger.append_header = None, not content


def _lines_elsewhere(callback: Any) -> list[str]:
    """Returns the file of a CSVLogger that is not on this machine."""
    if not isinstance(callback, keras.callbacks.CSVLogger) or callback.csv_file is None:
        return []
    is_here = Path(callback.filename).is_file()
    return [] if is_here else [f"{type(callback).__name__}: the lines of {callback.filename}"]


def _closures(callback: Any) -> list[str]:
    """Returns the variables that the functions of a LambdaCallback close over."""
    found = {}
    if not isinstance(callback, keras.callbacks.LambdaCallback):
        return []
    for hook in vars(callback).values():
        function: Callable[..., Any] = hook
        if not inspect.isfunction(function) or function.__closure__ is None:
            continue
        if keras_compat.is_builtin(function):
            continue
        for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if isinstance(value, _MUTABLE):
                found[f"{type(callback).__name__}: {name} ({type(value).__name__})"] = None
    return list(found)
