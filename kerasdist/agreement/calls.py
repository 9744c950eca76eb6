"""The arguments of `fit`, `evaluate` or `predict` that must be equal on all workers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from kerasdist import keras_compat
from kerasdist.agreement.description import described, of_array
from kerasdist.input.distributed import DistributedDataset, equivalent, shards_itself
from kerasdist.job.job import Job

_ARGUMENTS = (
    "epochs",
    "initial_epoch",
    "batch_size",
    "steps_per_epoch",
    "steps",
    "shuffle",
    "class_weight",
    "validation_split",
    "validation_steps",
    "validation_batch_size",
    "validation_freq",
)

_DATA = ("x", "y", "sample_weight", "validation_data")

# Arguments of callbacks that do not affect training.
_LEFT_OUT = ("self", "verbose")


def facts_of(
    arguments: Mapping[str, Any], job: Job, kinds: tuple[type[Any], ...]
) -> dict[str, Any]:
    """Returns what must be equal on all workers."""
    facts = {
        f"argument {name}": described(arguments[name]) for name in _ARGUMENTS if name in arguments
    }
    for name in _DATA:
        if arguments.get(name) is not None:
            facts[name] = _of_data(arguments[name], job)
    if "callbacks" in arguments:
        facts["callbacks"] = [
            _of_callback(one)
            for one in callbacks_of(arguments["callbacks"])
            if isinstance(one, kinds)
        ]
    return facts


def _of_data(data: Any, job: Job) -> Any:
    if isinstance(data, dict):
        return {str(name): _of_data(one, job) for name, one in data.items()}
    if isinstance(data, list | tuple):
        if data and isinstance(data[0], bool | int | float):
            return of_array(np.asarray(data))
        return [_of_data(one, job) for one in data]
    if isinstance(data, DistributedDataset):
        return type(equivalent(data)).__name__
    if shards_itself(data, job):
        return "a part of a tf.data.Dataset"
    kind = type(data).__name__
    if isinstance(data, keras_compat.DataAdapter):
        return "data of the same call"  # `fit` passes its validation data on to `evaluate`
    if keras_compat.is_tf_dataset(data):
        return {"class": "tf.data.Dataset", "element_spec": str(data.element_spec)}
    if keras_compat.is_torch_dataloader(data):
        return {"class": kind, "batch_size": data.batch_size, "drop_last": data.drop_last}
    if isinstance(data, keras_compat.PyDataset):
        return {"class": kind}
    if len(getattr(data, "shape", ())) > 0:
        return _of_rows(data)
    return described(data) if isinstance(data, bool | int | float | str | None) else kind


def _of_rows(data: Any) -> Any:
    if getattr(data, "dtype", None) is not None:
        return of_array(data)
    # A pandas DataFrame.
    facts = {"class": type(data).__name__, "shape": str(tuple(data.shape))}
    try:
        return {**facts, **of_array(data.to_numpy())}
    except Exception:  # noqa: BLE001  a table with columns that are no numbers
        return facts


def callbacks_of(callbacks: Any) -> list[Any]:
    """Returns the callbacks in an argument of `fit`."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks.callbacks
    return keras.tree.flatten(callbacks) if callbacks else []


def _of_callback(callback: Any) -> dict[str, Any]:
    # LearningRateWarmup keeps its target and start as `_given`.
    given = {*inspect.signature(type(callback).__init__).parameters, "given"}
    own = {
        # Keras changes the sign of `min_delta` when the first epoch ends.
        name: described(abs(value) if name == "min_delta" else value)
        for name, value in vars(callback).items()
        if name.removeprefix("_") in given and name not in _LEFT_OUT
    }
    return {"class": type(callback).__name__, **own}
