"""A model's trainer, as code outside of `training` uses it; it is an attribute of the model."""

from __future__ import annotations

from typing import Any, Final, Protocol

import keras

TRAINER: Final = "_kerasdist_trainer"


class TrainerLike(Protocol):
    """The attributes and methods of a model's trainer that other packages use.

    Attributes:
        model: The Keras model.
        strategy: The strategy under which the model was made.
        replicas: The strategy's replica set.
        given_metrics: The metrics and weighted metrics that ``compile`` got.
        made: Which functions, such as the result of ``make_train_function``, the trainer has made.
    """

    model: Any
    strategy: Any
    replicas: Any
    given_metrics: list[object]
    made: set[str]

    def has_builtin(self, step: str) -> bool:
        """Returns whether a method of the model is Keras's own."""
        ...

    def prepare_step(self, batch: Any) -> None:
        """Makes the variables and metrics that a training step needs."""
        ...


def trainer_of(model: object) -> TrainerLike | None:
    """Returns the trainer of a model, None for a model made outside of every scope."""
    return vars(model).get(TRAINER)


def require_trainer(model: object) -> TrainerLike:
    """Returns the trainer of a model that was made in a scope."""
    trainer = trainer_of(model)
    assert trainer is not None, model
    return trainer


def remember_trainer(model: keras.Model, trainer: TrainerLike) -> None:
    """Sets the trainer as an attribute of a model, which Keras does not track."""
    object.__setattr__(model, TRAINER, trainer)
