"""Checks whether the results of the first step, programs and variables are equal on all workers.

Code may depend on anything: globals, files, the environment. So workers compare the results of a
step, not the code of the step. Each worker sends only a few numbers for an array: all workers
multiply their values of the array by the same random signs and add them up. The difference of two
workers' sums is about as large as the norm of the difference of their arrays, for any number of
elements.
"""

from __future__ import annotations

import gc
import math
import re
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, Protocol, final

import keras
import numpy as np

from kerasdist import keras_compat
from kerasdist.core.user_warnings import warn_user
from kerasdist.job import comparison
from kerasdist.job.job import Job
from kerasdist.keras_compat import ops

# The workers compare `_SUMS` sums of each array. For a sum, the array is laid out in lines of
# `_LINE` elements. Each line is multiplied by the same random signs, and also by one sign of its
# own. `_CHUNK` elements are read at a time.
_SUMS, _LINE, _CHUNK = 16, 1 << 10, 1 << 16

# For each type: the largest norm of a difference that rounding explains, divided by the size of the
# array (defined below). This number allows some roundings of each element in each step of an epoch.
# For types of 32 and 64 bits the number is less than a thousandth. In 16 bits even a single
# rounding is a thousandth.
_ROUNDING = {"float64": 1e-8, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}

# The size of an array is the norm of its deviations from the mean.
# For arrays that are nearly constant, the size is at least `_PART_OF_NORM` times the norm.
# The size is also at least the norm of an array of equal length whose elements are all `_LEAST`.
_PART_OF_NORM, _LEAST = 0.1, 1e-6

# For an array with fewer than `_FEW` elements, the size is the norm of the array itself. But the
# size is at least the norm of an array of equal length whose elements are all `_LEAST_OF_FEW`,
# because a small value, as in a bias, may be a sum of larger terms with larger rounding errors.
_FEW, _LEAST_OF_FEW = 100, 0.1


def measures_of(array: object) -> list[float]:
    """Returns an array's norm and size, counts of NaN, inf and -inf, and sums with random signs."""
    flat = np.asarray(array).reshape(-1)
    squares = total = 0.0
    not_finite, sums = np.zeros(3), np.zeros(_SUMS)
    turns = np.random.RandomState(1)
    for begin in range(0, flat.size, _CHUNK):
        some = flat[begin : begin + _CHUNK].astype("float64")
        if not np.isfinite(some).all():
            not_finite += [np.isnan(some).sum(), np.isposinf(some).sum(), np.isneginf(some).sum()]
            some[~np.isfinite(some)] = 0.0
        squares += float(some @ some)
        total += float(some.sum())
        lines = np.pad(some, (0, -some.size % _LINE)).reshape(-1, _LINE)
        signs = 1.0 - 2.0 * turns.randint(0, 2, (len(lines), _SUMS))
        sums += np.sum((lines @ _signs()) * signs, 0)
    if flat.size < _FEW:
        size = max(squares, _LEAST_OF_FEW**2 * flat.size) ** 0.5
    else:
        deviations = squares - total * total / flat.size
        size = max(deviations, _PART_OF_NORM**2 * squares, _LEAST**2 * flat.size) ** 0.5
    return [squares**0.5, size, *not_finite.tolist(), *sums.tolist()]


def difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns the norm of the difference of two arrays, divided by the larger of their sizes.

    The arguments are what `measures_of` returns for the arrays. The result is an estimate.
    """
    if list(one[2:5]) != list(other[2:5]):
        return float("inf")
    between = np.subtract(one[5:], other[5:])
    return float(np.sqrt(np.mean(between**2)) / max(one[1], other[1], np.finfo(float).tiny))


def rounding_of(dtype: str) -> float:
    """Returns by how much rounding alone may change values of a dtype, relative to their size."""
    return _ROUNDING.get(dtype, 0.0)


@cache
def _signs() -> np.ndarray[Any, Any]:
    return 1.0 - 2.0 * np.random.RandomState(0).randint(0, 2, (_LINE, _SUMS))


def checksum_of(array: object, start: int = 0) -> int:
    """Returns the CRC-32 of an array's bytes; `start` is the CRC-32 of the bytes before them."""
    values = np.ascontiguousarray(array)
    if values.dtype == object:
        return zlib.crc32(repr(values.tolist()).encode(), start)
    return zlib.crc32(values.reshape(-1).view(np.uint8).data, start)


def checksum_in_type(array: np.ndarray[Any, Any], dtype: str) -> int:
    """Returns the checksum that an array has as `dtype`; converts only a few rows at a time."""
    rows, total = np.atleast_1d(array), 0
    some = max(1, _CHUNK * len(rows) // max(1, rows.size))
    for begin in range(0, len(rows), some):
        total = checksum_of(rows[begin : begin + some].astype(dtype, copy=False), total)
    return total


# The tolerance if workers may have different devices, because the matrix products of different
# devices agree only to three digits. If all workers compute on CPUs, losses must agree up to the
# rounding of their type, because they are means over the batch. Gradients and metrics keep the
# larger tolerance: gradients have larger errors if their terms cancel, and a metric jumps if an
# example changes its class.
_DEVICES = 0.01

# A gradient whose norm is below this fraction of the largest gradient's norm is not compared,
# because it may consist of rounding errors only.
_LEAST_PART = 1e-3


def require_equal_results(
    job: Job,
    logs: Mapping[str, Any],
    gradients: Mapping[str, Any],
    dtypes: Iterable[str] | None = None,
) -> None:
    """Raises DisagreementError if a step on the same rows gives workers different results.

    All workers must call this function. The workers send digests; if the digests differ, the chief
    sends its results.

    Args:
        job: The job of the workers.
        logs: The losses and metrics of the step.
        gradients: The gradients of the step, by names that contain the paths of the variables.
        dtypes: The types in which the model computes, if its devices are CPUs; else None.
    """
    numbers = _numbers_of(logs)
    arrays = {f"gradient of {path}": one for path, one in gradients.items()}
    exact: dict[str, Any] = {name: repr(value) for name, value in numbers.items()}
    exact |= {name: checksum_of(one) for name, one in arrays.items()}
    if job.all_have_one("results of the first step", comparison.digest(exact)):
        return
    own = {**numbers, **{name: measures_of(one) for name, one in arrays.items()}}
    chiefs = job.broadcast_object("results of the first step on the chief", own)
    rounding = _DEVICES if dtypes is None else max(map(rounding_of, dtypes), default=_DEVICES)
    shown = {
        name: _shown((own if _is_apart(name, own, chiefs, rounding) else chiefs).get(name))
        for name in {**chiefs, **own}
    }
    job.assert_equal("results of the first step, here from the same rows", shown, _OTHER_RESULTS)


def _numbers_of(logs: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers in logs by name; numbers in an array have names such as ``loss[0]``."""
    found: dict[str, float] = {}
    for name, value in logs.items():
        values = np.ravel(np.asarray(value, "float64"))
        names = [name] if values.size == 1 else [f"{name}[{at}]" for at in range(values.size)]
        found.update(zip(names, map(float, values), strict=True))
    return found


_OTHER_RESULTS = (
    "The code of the model, its loss and metrics, or something that it uses (a global, an "
    "attribute of a layer, a file, an environment variable), is not the same on all workers."
)


def _is_apart(
    name: str, own: Mapping[str, Any], chiefs: Mapping[str, Any], rounding: float
) -> bool:
    one, other = own.get(name), chiefs.get(name)
    if one is None or other is None:
        return True
    if isinstance(one, float):
        both_not_finite = not math.isfinite(one) and not math.isfinite(other)
        allowed = min(rounding, _DEVICES) if name.endswith("loss") else _DEVICES
        return not both_not_finite and not math.isclose(one, other, rel_tol=allowed, abs_tol=1e-6)
    largest = max(theirs[0] for theirs in chiefs.values() if isinstance(theirs, list))
    if max(one[0], other[0]) < _LEAST_PART * largest:
        return False
    return difference(one, other) > _DEVICES


def _shown(value: Any) -> str:
    """Returns text for a number, or for the numbers that describe an array.

    Different values give different texts.
    """
    if value is None:
        return "nothing"
    if isinstance(value, float):
        return f"{value:.10g}"
    return f"norm {value[0]:.7g} ({zlib.crc32(repr(value).encode()):08x})"


# Matches the address of a Python function. The text of a compiled program contains such an address
# where the program calls a Python function.
_NUMBER = re.compile(r"\d{6,}")

# How many characters of a differing line of a program's text are sent to the other workers.
_CHARACTERS = 300


def digest_of(program: str) -> str:
    """Returns a digest of a compiled program's text; equal programs have equal digests."""
    return comparison.digest(_lines(program))


def _lines(program: str) -> list[str]:
    return [_NUMBER.sub("", one) if "callback" in one else one for one in program.splitlines()]


def require_equal_programs(job: Job, program: str) -> str:
    """Returns the digest of a compiled program's text, which must be equal on all workers.

    All workers must call this function.

    Raises:
        DisagreementError: If workers run different programs.
    """
    lines = _lines(program)
    first = job.first_difference("program of a step", lines)
    if first is not None:
        own = lines[first].strip() if first < len(lines) else "no further line"
        facts = {
            f"line {first + 1} of the program": own[:_CHARACTERS],
            # If the lines differ only after the part that is shown, their checksums still differ.
            f"checksum of line {first + 1}": zlib.crc32(own.encode()),
        }
        job.assert_equal("program", facts, _OTHER_PROGRAM)
    return digest_of(program)


_OTHER_PROGRAM = "The model, its step, or the first batch is not the same on all workers."

_NUMBER_OF_LAYER = re.compile(r"_\d+(?=[_/]|$)")


@final
class InitialBroadcast:
    """The new variables of a strategy, which the workers must still compare and make equal.

    Variables that no longer exist are ignored, because a single worker may have made them. For
    example, Keras makes some when only the chief saves a model (``saving_lib.get_attr_skipset`` in
    Keras 3.15.1).
    """

    def __init__(self, job: Job | None, equalize: Callable[[Sequence[Any]], None]) -> None:
        """Starts with no variables. The function `equalize` gives variables the chief's values."""
        self._job = job
        self._equalize = equalize
        self._new = weakref.WeakValueDictionary[int, Any]()  # by the variables' ids

    def add(self, variable: keras.Variable) -> None:
        """Adds a new variable; all workers must make the same variables in the same order."""
        self._new[id(variable)] = variable

    def waiting(self) -> list[Any]:
        """Returns the variables that the next call of `ensure` will compare and make equal."""
        if self._ready():
            gc.collect()  # frees unused variables, which may differ between workers
        return self._ready()

    def ensure(self) -> None:
        """Checks that all workers have made the same variables, and gives these the chief's values.

        All workers must call this method.
        """
        job = self._job
        if job is None or not self._new or not (ready := self.waiting()):
            return
        for one in ready:
            del self._new[id(one)]
        facts: dict[str, Any] = {"number of variables": len(ready)}
        facts |= {
            f"variable {number}": f"{unnumbered(one.path)} {tuple(one.shape)} {one.dtype}"
            for number, one in enumerate(ready)
        }
        job.assert_equal("variables made in the scope", facts)
        # The variables of metrics keep their values: a metric that was built in an eager step has
        # already counted this worker's examples.
        equal = [
            one for one in ready if (one.synchronization, one.aggregation) != ("on_read", "sum")
        ]
        if equal:
            self._equalize(equal)

    def _ready(self) -> list[Any]:
        """Returns the variables that still exist and have values."""
        return [one for one in self._new.values() if keras_compat.stored_value(one) is not None]


def unnumbered(path: str) -> str:
    """Returns a variable's path without the numbers by which Keras counts the layers it makes."""
    return _NUMBER_OF_LAYER.sub("", path)


class Workers(Protocol):
    """The methods of a `ReplicaSet` by which workers compare variables."""

    job: Job | None

    def checksums(self, variables: Sequence[keras.Variable]) -> list[int]:
        """Returns a checksum of each variable's value on this worker."""
        ...

    def equalize(self, variables: Sequence[keras.Variable]) -> None:
        """Gives variables the values that they have on the chief."""
        ...


def require_equal_weights(model: Any, replicas: Workers, when: str) -> None:
    """Raises DisagreementError if a model or its optimizer has different values on workers.

    All workers must call this function. Values that differ only by rounding are set to the chief's.
    """
    job = replicas.job
    if job is None:
        return
    variables = _variables(model)
    sums = replicas.checksums(variables)
    if job.all_have_one(f"weights at {when}", comparison.digest(sums)):
        return
    number = {"number of variables": len(variables)}
    job.assert_equal(f"variables at {when}", number, _OTHER_WEIGHTS)
    chiefs = job.broadcast_object(f"checksums at {when}", sums)
    own = [index for index, one in enumerate(sums) if one != chiefs[index]]
    apart = job.choose(f"what differs at {when}", own, lambda each: sorted(set(chain(*each))))
    measures = [measures_of(ops.convert_to_numpy(variables[index])) for index in apart]
    chiefs = job.broadcast_object(f"sizes of what differs at {when}", measures)
    shown: dict[str, str] = {}
    largest = 0.0
    for index, one, other in zip(apart, measures, chiefs, strict=True):
        between, variable = difference(one, other), variables[index]
        said = _shown(other)
        if between > rounding_of(variable.dtype):
            said = f"{_shown(one)}, which differs by {between:.2g} of its size"
        shown[f"variable {index} {unnumbered(variable.path)}"] = said
        largest = max(largest, between)
    job.assert_equal(f"weights at {when}", shown, _OTHER_WEIGHTS)
    largest = job.choose(f"largest difference at {when}", largest, max)
    replicas.equalize([variables[index] for index in apart])
    warn_user(
        f"{len(apart)} variables of the model {model.name!r} differed by rounding between workers "
        f"at {when}, by {largest:.2g} of their size at most, first {variables[apart[0]].path!r}. "
        "All workers continue with the chief's values. The reason is that the workers have "
        "different machines or numbers of threads."
    )


def _variables(model: keras.Model) -> list[Any]:
    """Returns the variables to compare: those that training changes equally on all workers."""
    optimizer = model.optimizer if model.compiled else None
    known = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
    return [
        one
        for one in {id(variable): variable for variable in known}.values()
        # The variables of metrics (on_read, sum) differ between workers, so they are left out.
        # Moving statistics (on_read, mean) are equal on all workers.
        if (one.synchronization != "on_read" or one.aggregation == "mean")
        and keras_compat.stored_value(one) is not None
        # Seeds are left out. An augmenting layer in a data pipeline changes its seed with each
        # batch, and the pipelines of the workers read different numbers of batches ahead.
        and not one.path.endswith("seed_generator_state")
    ]


_OTHER_WEIGHTS = (
    "Something has changed them on only some workers, such as `assign` in a callback. Do the same "
    "on all workers, or send the chief's values to all of them by "
    "kerasdist.callbacks.BroadcastGlobalVariables."
)
