"""Defines the meaning of a Keras variable's `synchronization` and `aggregation`.

In custom loops they mean the same as in ``tf.distribute``:

| synchronization | aggregation | what a replica assigns | what is read outside of replicas |
|---|---|---|---|
| auto, on_write | none | stays its own | the first replica's component |
| auto, on_write | sum, mean | all replicas get the sum or mean, at once | the value |
| auto, on_write | only_first_replica | all get the first replica's, at once | the value |
| on_read | sum, mean | stays its own | the sum or mean of the components |
| on_read | only_first_replica | stays its own | the first replica's component |
| on_read | none | stays its own | an error |
| none | any | an error; making it in the scope of several replicas is one, too | the value |

A value that is assigned outside of replicas goes to all components. If the variable is read as a
sum, each component gets an equal share of the value.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import keras

from kerasdist import keras_compat
from kerasdist.backends.base.checks import check_summable
from kerasdist.core.context import current


class Assignment(enum.Enum):
    """How the values that replicas of a custom loop assign to a variable are combined."""

    OWN = "own"
    SUM = "sum"
    MEAN = "mean"
    FIRST = "only_first_replica"


def assignment_in_loop(variable: keras.Variable) -> Assignment:
    """Returns how the values that replicas assign to a variable in a custom loop are combined."""
    if variable.synchronization == "none":
        raise ValueError(
            "Expected synchronization to be 'auto', 'on_write' or 'on_read' of a variable that "
            f"replicas assign to. Received: synchronization='none', variable={variable.path!r}. "
            "Make the variable with one of these values."
        )
    if is_on_read(variable) or variable.aggregation == "none":
        return Assignment.OWN
    counts_all_replicas(variable)
    return Assignment(variable.aggregation)


def never_synchronized() -> ValueError:
    """Returns the error for a variable of several replicas with ``synchronization="none"``."""
    return ValueError(
        "Expected synchronization to be 'auto', 'on_write' or 'on_read' of a variable that is made "
        "in the scope of a strategy. Received: synchronization='none'. Make the variable outside "
        "of the scope, or with one of these values."
    )


def require_first_made(variable: keras.Variable) -> None:
    """Refuses a shared variable that another replica than the first of this process makes.

    This error concerns PyTorch, whose replicas run one after another; on TensorFlow all replicas
    make the variable together.
    """
    replica = current.replica
    if replica is None or replica.local_batch is not None:
        return
    is_later = replica.replica_id_in_sync_group > replica.strategy.local_replicas.start
    if is_later and (variable.trainable or assignment_in_loop(variable) is not Assignment.OWN):
        raise made_in_every_call([variable.path])


def made_in_every_call(paths: Sequence[str]) -> ValueError:
    """Returns the error for a function of a custom loop that makes new variables in each call."""
    return ValueError(
        "Expected a function that creates its variables in its first call only. Received: new "
        f"variables in every call, such as {[*paths][:3]}. Make them outside of the function, "
        "or keep them where the next call finds them."
    )


def is_on_read(variable: keras.Variable) -> bool:
    """Returns whether a variable is aggregated when cross-replica code reads it."""
    return variable.synchronization == "on_read"


def is_sum_on_read(variable: keras.Variable) -> bool:
    """Returns whether a variable is read as the sum of its components; booleans have no sum."""
    is_sum = is_on_read(variable) and variable.aggregation == "sum"
    return is_sum and keras_compat.stored_dtype(variable) != "bool"


def counts_all_replicas(variable: keras.Variable) -> bool:
    """Returns whether a variable's aggregate is a sum or mean; refuses types that have none."""
    dtype = keras_compat.stored_dtype(variable)
    if variable.aggregation == "mean" and (dtype == "bool" or "int" in dtype):
        raise ValueError(
            "Expected a variable of floats to be assigned to in replica code, as its aggregation "
            f"is the mean. Received: variable={variable.path!r}, dtype={dtype}. Make it a variable "
            "of floats, or assign to it in cross-replica context (see ReplicaContext.merge_call)."
        )
    if variable.aggregation == "sum":
        check_summable(dtype)
    return variable.aggregation in ("sum", "mean")


def require_aggregate(variable: keras.Variable) -> None:
    """Refuses to read, outside of replicas, a variable that has no aggregate."""
    if is_on_read(variable) and variable.aggregation == "none":
        raise ValueError(
            "Expected a variable with an aggregation, as its replicas' components are aggregated "
            f"when it is read. Received: variable={variable.path!r}, synchronization='on_read', "
            "aggregation='none'. Read its components, with strategy.local_results(variable), or "
            "make it with an aggregation."
        )


class WithoutCommonValue(keras.Variable):
    """A mixin for a variable that only replicas may read, because it has no aggregate."""

    @property
    def value(self) -> Any:
        """The value; an error outside of replicas, unless in a trial or an update of copies."""
        if current.replica is None and current.trial is None and not current.updates_copies:
            require_aggregate(self)
        return super().value


def shares_of_integers(total: Any, replicas: int) -> tuple[Any, Any]:
    """Divides a sum of integers; returns the first replica's share, and the share of each other.

    The first share includes the remainder, because equal shares would not add up to the sum.
    """
    share = total // replicas
    return total - share * (replicas - 1), share
