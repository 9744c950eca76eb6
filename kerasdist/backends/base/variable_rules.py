"""Defines the meaning of a Keras variable's `synchronization` and `aggregation`.

In custom loops both arguments mean the same as in ``tf.distribute``:

| synchronization | aggregation | when replicas assign | what is read outside of replicas |
|---|---|---|---|
| auto, on_write | none | each keeps its own value | the first replica's component |
| auto, on_write | sum, mean | all get the sum or mean, at once | the value |
| auto, on_write | only_first_replica | all get the first replica's value, at once | the value |
| on_read | sum, mean | each keeps its own value | the sum or mean of the components |
| on_read | only_first_replica | each keeps its own value | the first replica's component |
| on_read | none | each keeps its own value | an error |
| none | any | an error | the value |

In the scope of a strategy with several replicas, it is also an error to make a variable with the
synchronization none.

A value that is assigned outside of replicas is assigned to all components. If the variable is read
as a sum, each component gets an equal part of the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from kerasdist import keras_compat
from kerasdist.backends.base.checks import check_summable
from kerasdist.core.context import current, scoped_strategy


def is_combined_on_write(variable: keras.Variable) -> bool:
    """Returns whether the values that replicas of a custom loop assign are combined at once.

    The variable's aggregation says how. If they are not combined, each replica keeps its own value.
    """
    if variable.synchronization == "none":
        raise ValueError(
            "Expected synchronization to be 'auto', 'on_write' or 'on_read' of a variable that "
            f"replicas assign to. Received: synchronization='none', variable={variable.path!r}. "
            "Make the variable with one of these values."
        )
    if is_on_read(variable) or variable.aggregation == "none":
        return False
    counts_all_replicas(variable)  # raises an error if the type does not allow the aggregation
    return True


def never_synchronized() -> ValueError:
    """Returns the error for a variable of several replicas with ``synchronization="none"``."""
    return ValueError(
        "Expected synchronization to be 'auto', 'on_write' or 'on_read' of a variable that is made "
        "in the scope of a strategy. Received: synchronization='none'. Make the variable outside "
        "of the scope, or with one of these values."
    )


def require_first_made(variable: keras.Variable) -> None:
    """Raises an error if a later replica makes a variable that all replicas share.

    Only the first replica of a process may make such a variable. The check is for PyTorch, whose
    replicas run one after another. On TensorFlow all replicas make a variable together.
    """
    replica = current.replica
    if replica is None or replica.local_batch is not None:
        return
    is_later = replica.replica_id_in_sync_group > replica.strategy.local_replicas.start
    if is_later and (variable.trainable or is_combined_on_write(variable)):
        raise made_in_every_call([variable.path])


def made_in_every_call(paths: Sequence[str]) -> ValueError:
    """Returns the error for a function of a custom loop that makes new variables in each call."""
    return ValueError(
        "Expected a function that creates its variables in its first call only. Received: new "
        f"variables in every call, such as {[*paths][:3]}. Make them outside of the function, "
        "or store them, so that the next call uses them again."
    )


def is_on_read(variable: keras.Variable) -> bool:
    """Returns whether a variable is aggregated when cross-replica code reads it."""
    return variable.synchronization == "on_read"


def is_sum_on_read(variable: keras.Variable) -> bool:
    """Returns whether a variable is read as the sum of its components; False for booleans."""
    is_sum = is_on_read(variable) and variable.aggregation == "sum"
    return is_sum and keras_compat.stored_dtype(variable) != "bool"


def terms_of_initial_value(variable: keras.Variable) -> int:
    """Returns the factor by which a new variable's value is larger than its initial value.

    If the variable is read as a sum, each replica's component starts with the initial value, so the
    factor is the number of replicas. For other variables it is 1.
    """
    strategy = scoped_strategy()
    return strategy.num_replicas_in_sync if strategy and is_sum_on_read(variable) else 1


def counts_all_replicas(variable: keras.Variable) -> bool:
    """Returns whether a variable's aggregation is sum or mean, which its type must allow."""
    dtype = keras_compat.stored_dtype(variable)
    if variable.aggregation == "mean" and (dtype == "bool" or "int" in dtype):
        raise ValueError(
            "Expected a variable of floats, as replica code assigns to it and its aggregation is "
            f"the mean. Received: variable={variable.path!r}, dtype={dtype}. Make it a variable "
            "of floats, or assign to it in cross-replica context (see ReplicaContext.merge_call)."
        )
    if variable.aggregation == "sum":
        check_summable(dtype)
    return variable.aggregation in ("sum", "mean")


def require_aggregate(variable: keras.Variable) -> None:
    """Refuses a sync-on-read variable without an aggregation, which only replicas may read."""
    if is_on_read(variable) and variable.aggregation == "none":
        raise ValueError(
            "Expected a variable with an aggregation, as its replicas' components are aggregated "
            f"when it is read. Received: variable={variable.path!r}, synchronization='on_read', "
            "aggregation='none'. Read its components, with strategy.local_results(variable), or "
            "make it with an aggregation."
        )


class WithoutCommonValue(keras.Variable):
    """A mixin for a variable that only replicas may read, because it has no aggregation."""

    @property
    def value(self) -> Any:
        """The value. Only replicas, trials and `StrategyExtended.update` may read it."""
        if current.replica is None and current.trial is None and not current.updates_copies:
            require_aggregate(self)
        return super().value


def shares_of_sum(total: Any, replicas: int) -> tuple[Any, Any]:
    """Divides a sum; returns the first replica's part, and the part of each other replica.

    The parts of a float are equal. If an integer cannot be divided evenly, the first replica also
    gets the remainder.
    """
    if "int" not in str(total.dtype):
        share = total / replicas
        return share, share
    share = total // replicas
    return total - share * (replicas - 1), share
