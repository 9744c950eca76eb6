"""Steps that wait for the sum of what all replicas give: of an optimizer, and assignments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from kerasdist import keras_seam
from kerasdist.backends.tensorflow.adoption import adopt
from kerasdist.backends.tensorflow.engine_seam import cross_replica_code_without_merge_call
from kerasdist.backends.tensorflow.outside_replicas import applying
from kerasdist.backends.tensorflow.variables import check_mirrored


@dataclass(frozen=True)
class Update:
    """A step of an optimizer, before the replicas' gradients are summed.

    Attributes:
        optimizer: The Keras optimizer.
        known: The variables that the gradients belong to.
        variables: The same as the caller said it, or None.
        gradients: This replica's gradients, weighted.
    """

    optimizer: Any
    known: list[Any]
    variables: list[Any] | None
    gradients: list[Any]

    def apply(self, engine: tf.distribute.Strategy, sums: list[Any]) -> None:
        """Updates every copy of the variables.

        Args:
            engine: The strategy, in cross-replica context.
            sums: The sums of all replicas' gradients.
        """
        with tf.init_scope():
            adopt(self.optimizer, engine, self.known)
            if not self.optimizer.built:
                self.optimizer.build(self.known)
        check_mirrored(self.optimizer.variables, engine, "the optimizer")
        with cross_replica_code_without_merge_call(), applying():
            keras_seam.apply_combined_gradients(self.optimizer, sums, self.variables)


@dataclass(frozen=True)
class Write:
    """An assignment, before the replicas' changes are summed.

    Attributes:
        variable: The Keras variable.
        before: Its value before.
        change: This replica's change of it, weighted.
        write: Keras's own function for it.
    """

    variable: Any
    before: tf.Tensor
    change: tf.Tensor
    write: Callable[[Any, Any], Any]

    def finish(self, total: tf.Tensor) -> None:
        """Writes the variable.

        Args:
            total: The sum of all replicas' changes.
        """
        self.write(self.variable, self.before + total)
