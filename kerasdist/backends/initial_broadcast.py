"""Variables start with the chief's values on every worker, whatever the seeds."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, final

from kerasdist import keras_compat
from kerasdist.backends.variable_rules import is_sum_on_read

if TYPE_CHECKING:
    from kerasdist.backends.base import ReplicaSet

_NUMBER = re.compile(r"_\d+(?=[_/]|$)")


@final
class InitialBroadcast:
    """The variables that a strategy's workers have made and not compared yet.

    Strong references keep them until then: if one worker's garbage collector took a variable
    earlier than another worker's, their lists would differ.
    """

    def __init__(self, replica_set: ReplicaSet) -> None:
        """Starts with no variables."""
        self._replica_set = replica_set
        self._new: list[Any] = []

    def add(self, variable: Any) -> None:
        """Adds a new variable; all workers must make the same variables in the same order."""
        if self._replica_set.job is not None:
            self._new.append(variable)

    def ensure(self) -> None:
        """Gives new variables the chief's values. All workers must call it."""
        job = self._replica_set.job
        if job is None or not self._new:
            return
        made, self._new = self._new, []
        ready = [one for one in made if keras_compat.stored_value(one) is not None]
        self._new = [one for one in made if keras_compat.stored_value(one) is None]
        facts = {
            f"variable {number}": f"{unnumbered(one.path)} {tuple(one.shape)} {one.dtype}"
            for number, one in enumerate(ready)
        }
        job.assert_equal("variables", {"number of variables": len(ready), **facts})
        # A metric that is built in an eager step has added up this worker's examples already.
        equal = [one for one in ready if not is_sum_on_read(one)]
        if equal:
            self._replica_set.equalize(equal)


def unnumbered(path: str) -> str:
    """Returns a variable's path without numbers, which Keras counts up with each layer it makes."""
    return _NUMBER.sub("", path)
