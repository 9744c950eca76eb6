"""A model's own ``make_train_function`` and its like: they run over replicas if they call Keras's.

What Keras's loop calls for each step is made by the model's trainer. A method of the user's that
calls ``super()`` gets that, and may wrap it. One that makes a function by itself would run steps
on one device alone, on data that are divided, so that it is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import keras

from kerasdist import keras_compat
from kerasdist.errors import UnsupportedError

if TYPE_CHECKING:
    from kerasdist.training.trainer import ReplicatedTrainer

_STEPS = {
    "make_train_function": "train_step",
    "make_test_function": "test_step",
    "make_predict_function": "predict_step",
}


def watch(trainer: ReplicatedTrainer, given: dict[str, Any]) -> None:
    """Adds a callback that looks who has made a call's functions, if the user may have."""
    is_alone = trainer.replicas.num_replicas == 1
    if is_alone or all(map(trainer.has_builtin, _STEPS)):
        return
    callbacks, watching = given["callbacks"], _Watch(trainer)
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.append(watching)
    else:
        given["callbacks"] = [*keras_compat.callbacks_of(callbacks), watching]


def require_made(trainer: ReplicatedTrainer, name: str) -> None:
    """Raises unless the trainer has made a function, for models that are trained over replicas."""
    if trainer.replicas.num_replicas == 1 or name in trainer.made:
        return
    model = trainer.model
    raise UnsupportedError(
        f"Expected a {name} that calls super().{name}(), which makes what runs over the replicas. "
        f"Received: model={model.name!r}, whose own {name} does not. Override {_STEPS[name]}, or "
        f"call super().{name}() and wrap what it has set."
    )


@final
class _Watch(keras.callbacks.Callback):
    """Looks who has made a function before its first step."""

    def __init__(self, trainer: ReplicatedTrainer) -> None:
        super().__init__()
        self._trainer = trainer

    def on_train_begin(self, logs: Any = None) -> None:
        """Looks at the function of `fit`."""
        require_made(self._trainer, "make_train_function")

    def on_test_begin(self, logs: Any = None) -> None:
        """Looks at the function of `evaluate`."""
        require_made(self._trainer, "make_test_function")

    def on_predict_begin(self, logs: Any = None) -> None:
        """Looks at the function of `predict`."""
        require_made(self._trainer, "make_predict_function")
