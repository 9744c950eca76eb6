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
        given_metrics: What ``compile`` got as metrics and weighted metrics.
        made: The methods, such as ``make_train_function``, that have made the trainer's function.
        most_rows: How many rows a replica has in a pass, if that was found; None means all.
        most_examples: The largest batch, in examples, for which `most_rows` is known.
    """

    model: Any
    strategy: Any
    replicas: Any
    given_metrics: list[object]
    made: set[str]
    most_rows: int | None
    most_examples: int

    def keep_rows(self, rows: int | None, examples: int) -> None:
        """Sets the rows that a replica has in a pass, for batches of `examples` examples."""
        ...

    def require_passes(self) -> None:
        """Refuses a model whose calls cannot be made in passes, as far as that is known."""
        ...

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
