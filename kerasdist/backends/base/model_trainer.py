"""An interface of trainers, which run the steps of models.

It is for packages that cannot import `kerasdist.training`, because that package imports them.
"""

from __future__ import annotations

import abc
from typing import Any, Final

from kerasdist import keras_compat
from kerasdist.errors import UnsupportedError

TRAINER: Final = "_kerasdist_trainer"
"""The name of the attribute in which a model stores its trainer."""


class TrainerLike(abc.ABC):
    """The attributes and methods of a model's trainer that are used outside of trainers.

    Attributes:
        model: The Keras model.
        strategy: The strategy under which the model was made.
        replicas: The strategy's replica set.
        given_metrics: The metrics and weighted metrics that ``compile`` got, flattened. An output
            without metrics has the entry None.
        made: Which functions the trainer has already made. For each of them, the set has the name
            of the model's method that makes it: ``make_train_function``, ``make_test_function`` or
            ``make_predict_function``.
        most_rows: How many rows a replica may process in one pass, found by trial steps. None: a
            replica processes all of its rows in one pass.
        most_examples: The largest batch, in examples, for which `most_rows` is known.
    """

    most_rows: int | None = None
    most_examples = 0

    def __init__(self, model: Any, strategy: Any, replicas: Any) -> None:
        """Only stores the arguments, because the model's own ``__init__`` runs later."""
        self.model = model
        self.strategy = strategy
        self.replicas: Any = replicas
        self.given_metrics: list[object] = []
        self.made: set[str] = set()

    def keep_rows(self, rows: int | None, examples: int) -> None:
        """Sets `most_rows`, which was found for batches of `examples` examples.

        Models inside of this model get the same number, because this model's step may call them
        directly.
        """
        for layer in [self.model, *keras_compat.flat_layers(self.model)]:
            trainer = trainer_of(layer)
            if trainer is not None:
                trainer.most_rows, trainer.most_examples = rows, examples

    @property
    def trial_class(self) -> type[Any]:
        """The class of trials. A `Trial` runs a training step on copies of the variables.

        Two trials, on the replicas and on one device, show whether the results are equal.

        Raises:
            UnsupportedError: If there is only one device, so that there is nothing to compare.
        """
        raise UnsupportedError(
            "Expected a strategy of several devices, to compare it with one device. Received: a "
            f"strategy of devices={[str(device) for device in self.replicas.devices]}. There is "
            "nothing to compare."
        )

    @abc.abstractmethod
    def require_passes(self) -> None:
        """Refuses a model that cannot process a replica's rows in several passes.

        Only the reasons that are known before a step runs are checked here.
        """

    def has_builtin(self, step: str) -> bool:
        """Returns whether Keras defines a step of this model, and not the user."""
        return keras_compat.is_builtin(defined_by_user(self.model, step))

    def prepare_step(self, batch: Any) -> None:
        """Builds the model, metrics and optimizer for a batch, and makes the train function."""
        keras_compat.build_symbolically(self.model, batch)
        self.model.make_train_function()


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


def defined_by_user(instance: object, name: str) -> Any:
    """Returns an object's attribute as the user or Keras defines it; None if neither does.

    Definitions in kerasdist's own classes are ignored. An attribute that is set on the object
    itself takes precedence over an attribute of its class.
    """
    own = getattr(instance, "__dict__", {}).get(name)
    if own is not None:
        return own
    for parent in type(instance).__mro__:
        found = vars(parent).get(name)
        if found is not None and not parent.__module__.startswith("kerasdist."):
            return found
    return None
