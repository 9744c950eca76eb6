"""The state of a training run that a restarted run needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np

from kerasdist import keras_compat
from kerasdist.backends.base import random_states
from kerasdist.backends.base.interface import ReplicaSet
from kerasdist.backends.base.pieces import HeldPiece
from kerasdist.backends.base.variable_rules import is_on_read, is_sum_on_read
from kerasdist.callbacks.backup_file import Unread, dtype_of
from kerasdist.job.job import Job
from kerasdist.keras_compat import ops


def variables_of(model: Any) -> list[Any]:
    """Returns all variables of a training run: weights, seeds, optimizer, metrics."""
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    seen: dict[int, Any] = {}
    for variable in [*model.variables, *model.optimizer.variables, *model.metrics_variables]:
        seen.setdefault(id(variable), variable)
    return list(seen.values())


def forms(variables: Sequence[Any]) -> dict[str, Any]:
    """Returns the shapes and types of variables.

    Their names are left out: they count up with each model that a process makes.
    """
    return {
        f"variable {number}": [list(variable.shape), variable.dtype]
        for number, variable in enumerate(variables)
    }


def pieces(variables: Sequence[Any], replicas: ReplicaSet) -> dict[int, Sequence[HeldPiece]]:
    """Returns what this worker holds of the variables that workers divide, by their numbers."""
    held = {number: replicas.pieces(variable) for number, variable in enumerate(variables)}
    return {number: own for number, own in held.items() if own}


def to_write(variables: Sequence[Any], elsewhere: Mapping[int, Any]) -> list[Any]:
    """Returns the variables' values for a file; those that are not aggregated are read as late.

    All workers must call it, and `read_along` or write the file.

    Args:
        variables: The variables.
        elsewhere: By number, those that other files have, in whose place is None.
    """
    listed: list[Any] = []
    for number, variable in enumerate(variables):
        if number in elsewhere:
            listed.append(None)
        elif is_on_read(variable):
            listed.append(np.array(ops.convert_to_numpy(variable)))
        else:
            dtype = keras.backend.standardize_dtype(keras_compat.stored_value(variable).dtype)
            read = partial(_value, variable)
            listed.append(Unread(dtype_of(dtype), tuple(variable.shape), read))
    return listed


def _value(variable: Any) -> np.ndarray[Any, Any]:
    return ops.convert_to_numpy(variable.value)


def read_along(arrays: Sequence[Any]) -> None:
    """Takes part in the chief's reads of variables while it writes them."""
    for one in arrays:
        if isinstance(one, Unread):
            one.read()


def add_up_anew(variables: Sequence[Any], arrays: Sequence[Any]) -> None:
    """Sets the replicas' parts of the metrics' sums to those of a restored run.

    The run then adds the same numbers in the same order as the uninterrupted run, and has the same
    results to the last bit. All workers must call it.
    """
    for variable, value in zip(variables, arrays, strict=True):
        if is_sum_on_read(variable):
            variable.assign(value)


def random_states_of_gpus(job: Job | None) -> list[list[str]]:
    """Returns, on the chief, each worker's states of its GPUs' generators. All must call it."""
    own = random_states.of_gpus()
    return [own] if job is None else job.gather_object("random states of GPUs", own)


def put_back_random_states_of_gpus(states: Sequence[list[str]], rank: int) -> None:
    """Sets these generators, if the run has as many workers as the backup."""
    if rank < len(states):
        random_states.put_back_gpus(states[rank])
