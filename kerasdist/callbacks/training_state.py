"""What a training run must find again to go on as if nothing had happened."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from kerasdist import keras_seam
from kerasdist.backends import registry
from kerasdist.callbacks.backup_file import Backup
from kerasdist.errors import BackupError
from kerasdist.job.job import Job
from kerasdist.keras_seam import ops


def variables_of(model: Any) -> list[Any]:
    """Returns all variables of a training run: weights, seeds, optimizer, metrics.

    Args:
        model: A model that is built and compiled.
    """
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    seen: dict[int, Any] = {}
    for variable in [*model.variables, *model.optimizer.variables, *model.metrics_variables]:
        seen.setdefault(id(variable), variable)
    return list(seen.values())


def forms(model: Any, variables: Sequence[Any]) -> dict[str, Any]:
    """Returns what must be equal for the values of a backup to fit.

    Not the names of layers, which count up with each model that a process makes.

    Args:
        model: The model.
        variables: Its variables, those of the optimizer and of the metrics among them.
    """
    return {
        "optimizer": type(model.optimizer).__name__,
        "number of variables": len(variables),
        **{
            f"variable {number}": [list(variable.shape), variable.dtype]
            for number, variable in enumerate(variables)
        },
    }


def values(variables: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
    """Returns the variables' values. All workers must call it.

    Args:
        variables: Keras variables.
    """
    return [np.array(ops.convert_to_numpy(variable)) for variable in variables]


def put_back(variables: Sequence[Any], backup: Backup) -> None:
    """Gives variables the values of a backup.

    Args:
        variables: Keras variables, of the forms that the backup has.
        backup: The backup.
    """
    for variable, value in zip(variables, backup.arrays[: len(variables)], strict=True):
        variable.assign(value)


def add_up_anew(variables: Sequence[Any], arrays: Sequence[np.ndarray[Any, Any]]) -> None:
    """Gives replicas the sums that they add up together, as a run that is restored gets them.

    It then goes on with the same parts, adds the same numbers in the same order, and comes to the
    same results to the last bit. All workers must call it.

    Args:
        variables: Keras variables.
        arrays: Their `values`.
    """
    for variable, value in zip(variables, arrays, strict=True):
        if variable.synchronization == "on_read" and variable.aggregation == "sum":
            variable.assign(value)


def require_same(own: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuses a backup of another model.

    Args:
        own: The forms of this model.
        expected: The forms that the backup has.

    Raises:
        BackupError: If they differ.
    """
    for name, form in expected.items():
        if own.get(name) != form:
            raise BackupError(
                f"it is of another model: {name} is {form} there, and {own.get(name)} in this one"
            )


def random_states() -> dict[str, Any]:
    """Returns the states of the generators that shuffle data and make seeds."""
    version, state, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    generator = keras_seam.global_seed_generator()
    torch = registry.torch_states()  # from which a DataLoader draws, on every backend
    return {
        "python": [version, list(state), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        "framework": registry.current().random_state(),
        "torch": None if torch is None else torch.random_state(),
        "keras": None if generator is None else ops.convert_to_numpy(generator.state).tolist(),
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    """Lets the generators go on from kept states.

    Args:
        states: What `random_states` returned.
    """
    version, state, gauss = states["python"]
    random.setstate((version, tuple(state), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    registry.current().set_random_state(states["framework"])
    torch = registry.torch_states()
    if torch is not None and states["torch"] is not None:
        torch.set_random_state(states["torch"])
    if states["keras"] is not None:
        generator = keras_seam.global_seed_generator() or keras.random.SeedGenerator(0)
        generator.state.assign(np.array(states["keras"]))
        keras_seam.set_global_seed_generator(generator)


def own_random_states(job: Job | None) -> list[Any]:
    """Returns the states of generators that differ by worker. All workers must call it.

    Args:
        job: The job, None for a process that is alone.
    """
    own = registry.current().own_random_states()
    return [own] if job is None or not own else job.exchange("random states of GPUs", own)


def set_own_random_states(states: Sequence[Any], rank: int) -> None:
    """Lets these generators go on, if this run has as many workers as that of the backup had.

    Args:
        states: What `own_random_states` returned.
        rank: Which worker this is.
    """
    if rank < len(states):
        registry.current().set_own_random_states(states[rank])
