"""Variables start with the chief's values on every worker, whatever the seeds."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, final

from kerasdist import keras_seam

if TYPE_CHECKING:
    from kerasdist.backends.base import ReplicaSet

_NUMBER = re.compile(r"_\d+(?=[_/]|$)")


@final
class EqualStart:
    """The variables that a strategy's workers have made and not compared yet.

    They are held until then: a variable that one worker's garbage collector takes earlier than
    another's would make their lists differ.
    """

    def __init__(self, replica_set: ReplicaSet) -> None:
        """Starts with none.

        Args:
            replica_set: Whose workers are meant.
        """
        self._replica_set = replica_set
        self._new: list[Any] = []

    def note(self, variable: Any) -> None:
        """Notes that a variable was made; all workers make the same.

        Args:
            variable: A Keras variable.
        """
        if self._replica_set.job is not None:
            self._new.append(variable)

    def ensure(self) -> None:
        """Gives new variables the chief's values. All workers must call it.

        Raises:
            DisagreementError: If workers have made other variables.
        """
        job = self._replica_set.job
        if job is None or not self._new:
            return
        made, self._new = self._new, []
        ready = [one for one in made if keras_seam.stored_value(one) is not None]
        self._new = [one for one in made if keras_seam.stored_value(one) is None]
        facts = {
            f"variable {number}": f"{unnumbered(one.path)} {tuple(one.shape)} {one.dtype}"
            for number, one in enumerate(ready)
        }
        job.agree("variables", {"number of variables": len(ready), **facts})
        if ready:
            self._replica_set.equalize(ready)


def unnumbered(path: str) -> str:
    """Returns a variable's path without numbers, which Keras counts up with each layer it makes.

    Args:
        path: Such as ``sequential/dense_1/kernel``.
    """
    return _NUMBER.sub("", path)
