"""The backup that a call of `fit` goes on from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from kerasdist import keras_compat
from kerasdist.backends.base.interface import ReplicaSet
from kerasdist.callbacks.backup_parts import StoredVariables
from kerasdist.callbacks.broadcast import broadcast, broadcast_arrays
from kerasdist.training.binding import binding_of


@final
class Restored:
    """Gives the variables a backup's values on every worker, and keeps the rest of the backup.

    Attributes:
        facts: What JSON can say.
        arrays: The arrays that the facts name by number; those of variables are not among them.
    """

    def __init__(
        self,
        model: Any,
        variables: Sequence[Any],
        stored: StoredVariables | None,
        facts: Mapping[str, Any],
        *,
        seen_by_all: bool,
    ) -> None:
        """Restores the variables. All workers must call it.

        Args:
            model: The model.
            variables: Its variables, in the order of the backup.
            stored: The backup; None on workers that do not see it.
            facts: The facts of the backup.
            seen_by_all: Whether all workers see it, and read what they hold by themselves.
        """
        self.facts = facts
        self._model = model
        self._variables = variables
        self._stored = stored
        self._seen_by_all = seen_by_all
        self.restore()
        count = len(variables)
        extra = [] if stored is None else map(stored.chiefs.array, stored.numbers[count:])
        extra = broadcast_arrays(model, list(extra), facts["arrays"])
        self.arrays: Sequence[Any] = [None] * count + extra

    def restore(self) -> None:
        """Restores the variables. All workers must call it."""
        replicas = _divided_by(self._model)
        if replicas is not None:
            self._restore_divided(replicas)
            return
        if self._stored is not None:
            for number, variable in enumerate(self._variables):
                variable.assign(self._stored.whole(number))
        broadcast(self._model, self._model.metrics_variables)

    def _restore_divided(self, replicas: ReplicaSet) -> None:
        """Restores one variable after another. All workers must call it.

        Each reads what it holds, or gets whole variables from the chief if it does not see files.
        """
        replicas.initial_broadcast.ensure()
        stored = self._stored
        for number, variable in enumerate(self._variables):
            if stored is None or not self._seen_by_all:
                own = [] if stored is None else [stored.whole(number)]
                form = [keras_compat.stored_dtype(variable), variable.shape]
                [value] = broadcast_arrays(self._model, own, [form])
                variable.assign(value)
                continue
            pieces = replicas.pieces(variable)
            for piece in pieces:
                piece.write(stored.part(number, piece.region))
            if not pieces:
                variable.assign(stored.whole(number))


def _divided_by(model: Any) -> ReplicaSet | None:
    """Returns the replicas that divide a model's state between workers, None if none do."""
    binding = binding_of(model)
    return binding.replicas if binding is not None and binding.replicas.divides_state else None
