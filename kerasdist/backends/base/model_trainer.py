"""The interface of trainers, which run the steps of models, and access to a model's trainer."""

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
        given_metrics: What ``compile`` got as metrics and weighted metrics.
        made: The names of the model's methods, such as ``make_train_function``, whose function the
            trainer has already made.
        most_rows: The most rows with which a replica calls the model at once, so that they fit into
            memory; None for all its rows.
        most_examples: The largest global batch, in examples, for which `most_rows` is known.
    """

    model: Any
    strategy: Any
    replicas: Any
    given_metrics: list[object]
    made: set[str]
    most_rows: int | None
    most_examples: int

    def keep_rows(self, rows: int | None, examples: int) -> None:
        """Sets `most_rows` to `rows` and `most_examples` to `examples`, also for inner models."""
        ...

    def require_passes(self) -> None:
        """Raises an error if the model is known not to support several calls per batch."""
        ...

    def has_builtin(self, step: str) -> bool:
        """Returns whether a method of the model, such as ``train_step``, is Keras's own."""
        ...

    def prepare_step(self, batch: Any) -> None:
        """Makes the variables and metrics that a training step needs."""
        ...


def trainer_of(model: object) -> TrainerLike | None:
    """Returns the trainer of a model; None for a model that was made outside of every scope."""
    return vars(model).get(TRAINER)


def replicas_of(model: object) -> Any:
    """Returns the replicas of a model's strategy; None for a model made outside of every scope."""
    trainer = trainer_of(model)
    return None if trainer is None else trainer.replicas


def require_trainer(model: object) -> TrainerLike:
    """Returns the trainer of a model that was made in a scope."""
    trainer = trainer_of(model)
    assert trainer is not None, model
    return trainer


def remember_trainer(model: keras.Model, trainer: TrainerLike) -> None:
    """Makes a trainer an attribute of its model, without Keras tracking the attribute."""
    object.__setattr__(model, TRAINER, trainer)
