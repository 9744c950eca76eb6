"""Variables start with the chief's values on every worker, whatever the seeds."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

from kerasdist import keras_compat
from kerasdist.backends.base.variable_rules import is_sum_on_read

if TYPE_CHECKING:
    from kerasdist.job.job import Job

_NUMBER = re.compile(r"_\d+(?=[_/]|$)")


@final
class InitialBroadcast:
    """The variables that a strategy's workers have made and not compared yet.

    Those that are gone by then do not count: one worker alone may have made them, as Keras does
    where the chief alone saves a model (``saving_lib.get_attr_skipset``, 3.15.1).
    """

    def __init__(self, job: Job | None, equalize: Callable[[Sequence[Any]], None]) -> None:
        """Starts with no variables; `equalize` gives variables the chief's values."""
        self._job = job
        self._equalize = equalize
        self._new: list[weakref.ref[Any]] = []

    def add(self, variable: Any) -> None:
        """Adds a new variable; all workers must make the same variables in the same order."""
        if self._job is not None:
            self._new.append(weakref.ref(variable))

    def ensure(self) -> None:
        """Gives new variables the chief's values. All workers must call it."""
        job = self._job
        if job is None or not self._new:
            return
        if self._ready():
            gc.collect()  # else one worker may hold in a circle what is gone on another
        ready = self._ready()
        if not ready:
            return
        done = set(map(id, ready))
        self._new = [known for known in self._new if id(known()) not in done]
        facts: dict[str, Any] = {"number of variables": len(ready)}
        facts |= {
            f"variable {number}": f"{unnumbered(one.path)} {tuple(one.shape)} {one.dtype}"
            for number, one in enumerate(ready)
        }
        job.assert_equal("variables made in the scope", facts)
        # A metric that is built in an eager step has added up this worker's examples already.
        equal = [one for one in ready if not is_sum_on_read(one)]
        if equal:
            self._equalize(equal)

    def _ready(self) -> list[Any]:
        """Returns the variables that still exist, and have values."""
        alive = [one for one in (known() for known in self._new) if one is not None]
        self._new = list(map(weakref.ref, alive))
        return [one for one in alive if keras_compat.stored_value(one) is not None]


def unnumbered(path: str) -> str:
    """Returns a variable's path without numbers, which Keras counts up with each layer it makes."""
    return _NUMBER.sub("", path)
