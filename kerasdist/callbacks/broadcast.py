"""The chief's variables for all workers, when training begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import keras

from kerasdist.errors import UnsupportedError
from kerasdist.training.binding import binding_of


@final
class BroadcastGlobalVariables(keras.callbacks.Callback):
    """Gives every worker the chief's variables of the model and the optimizer, as `fit` begins.

    New variables start equal by themselves. This is for those that changed afterwards on the chief
    alone, such as weights that only the chief has loaded.

    Example::

        model.fit(x, y, callbacks=[kd.callbacks.BroadcastGlobalVariables()])

    Source: Horovod's ``BroadcastGlobalVariablesCallback``.
    """

    def __init__(self, root_rank: int = 0) -> None:
        """Makes the callback.

        Args:
            root_rank: Whose variables; only 0, the chief, is possible.

        Raises:
            ValueError: If it is another.
        """
        super().__init__()
        if root_rank != 0:
            raise ValueError(
                "Expected the chief to be the one whose variables all get. Received: "
                f"root_rank={root_rank!r}. Load the variables on worker 0."
            )

    def on_train_begin(self, logs: dict[str, object] | None = None) -> None:
        """Sends the variables. All workers must call it.

        Raises:
            UnsupportedError: If the workers divide the model's state (``sharding=``).
        """
        del logs
        binding = binding_of(self.model)
        if binding is not None and binding.replicas.divides_state:
            raise UnsupportedError(
                "Expected a strategy whose workers hold all variables. Received: "
                "BroadcastGlobalVariables, with sharding="
                f"{binding.replicas.options.sharding!r:.200}. The chief has no other worker's part "
                "of a variable: load the weights on all workers."
            )
        broadcast(self.model)


def broadcast(model: Any, others: Sequence[keras.Variable] = ()) -> None:
    """Gives every worker the chief's values of a model's variables, its optimizer's, and others.

    All workers must call it.
    """
    binding = binding_of(model)
    if binding is not None and binding.replicas.job is not None:
        binding.replicas.initial_broadcast.ensure()
        binding.replicas.equalize([*model.variables, *model.optimizer.variables, *others])
