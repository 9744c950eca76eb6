"""Equal variables on all workers, when training begins."""

from __future__ import annotations

from typing import Any, final

import keras

from kerasdist.binding import binding_of


@final
class BroadcastGlobalVariables(keras.callbacks.Callback):
    """Gives every worker the chief's variables of the model and the optimizer, as `fit` begins.

    New variables start equal by themselves. This is for those that changed afterwards on the chief
    alone, such as weights that only the chief has loaded.

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

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Sends the variables. All workers must call it."""
        del logs
        broadcast(self.model)


def broadcast(model: Any) -> None:
    """Gives every worker the chief's variables of a model and its optimizer.

    All workers must call it.

    Args:
        model: A model that is built.
    """
    binding = binding_of(model)
    if binding is not None and binding.replicas.job is not None:
        binding.replicas.equal_start.ensure()
        binding.replicas.equalize([*model.variables, *model.optimizer.variables])
