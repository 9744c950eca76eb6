"""What a model computes: layers, wiring, optimizers, and the arguments of `compile`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from kerasdist import keras_compat
from kerasdist.agreement.description import configuration, described, of_array
from kerasdist.input.distributed import (
    DistributedDataset,
    DividedDataset,
    equivalent,
    shards_itself,
)
from kerasdist.job.job import Job

# The attribute for the arguments of `compile`; set without Keras's tracking.
_COMPILED = "_kerasdist_compiled"

# The attribute for the facts that workers have compared since `compile`.
_COMPARED = "_kerasdist_compared"


def record_compile(model: keras.Model, given: Mapping[str, Any]) -> None:
    """Keeps the arguments of `compile` on the model."""
    facts = {name: described(value) for name, value in given.items() if name != "optimizer"}
    object.__setattr__(model, _COMPILED, facts)
    object.__setattr__(model, _COMPARED, None)


def is_compared(model: keras.Model) -> bool:
    """Returns whether workers have compared the model since it was compiled."""
    return vars(model).get(_COMPARED) is not None


def facts_of(model: Any, *, anew: bool) -> dict[str, Any]:
    """Returns what must be equal on all workers."""
    known = vars(model).get(_COMPARED)
    return _facts(model) if known is None or anew else known


def mark_compared(model: keras.Model, facts: Mapping[str, Any]) -> None:
    """Records that all workers have compared the model, and found it equal."""
    object.__setattr__(model, _COMPARED, facts)


def _facts(model: keras.Model) -> dict[str, Any]:
    layers = keras_compat.flat_layers(model)
    classes = frozenset(type(layer).__name__ for layer in layers)
    wirings = [_wiring(one) for one in (model, *layers)]
    own = configuration(model, classes)
    return {
        "model": _named(model),
        **{name: facts for name, facts in own.items() if name != "class" and facts},
        "layers": [_of_layer(layer, classes) for layer in layers],
        "wiring": [wires for wires in wirings if wires],
        **_attributes(model),
        "compile": vars(model).get(_COMPILED, {}),
    }


def _of_layer(layer: keras.Layer, classes: frozenset[str]) -> dict[str, Any]:
    facts = {**configuration(layer, classes), "class": _named(layer)}
    return {"trainable": layer.trainable, **facts}


def _wiring(model: keras.Model) -> list[Any]:
    return [_of_call(*one) for one in keras_compat.wiring(model)]


def _of_call(operation: object, calls: list[Any]) -> Any:
    is_layer = isinstance(operation, keras.Layer)
    facts = {"class": _named(operation)} if is_layer else configuration(operation)
    return {**facts, "calls": described(calls)}


def _named(one: Any) -> str:
    """Returns an object's class, and its name if the user has chosen one."""
    kind = type(one)
    own = not keras_compat.is_default_name(one.name, kind)
    return f"{kind.__name__} {one.name!r}" if own else kind.__name__


def _attributes(model: keras.Model) -> dict[str, Any]:
    """Returns the optimizers and losses that a model keeps, for its own `train_step` or Keras's."""
    facts: dict[str, Any] = {}
    for name, value in vars(model).items():
        if name.startswith("_"):
            continue
        if isinstance(value, keras.optimizers.Optimizer | keras.losses.Loss):
            facts[name] = configuration(value)
    return facts


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
_ARGUMENTS_LEFT_OUT = ("self", "verbose")


def facts_of_call(
    arguments: Mapping[str, Any], job: Job, kinds: tuple[type[Any], ...]
) -> dict[str, Any]:
    """Returns what must be equal on all workers."""
    facts = {
        f"argument {name}": described(arguments[name]) for name in _ARGUMENTS if name in arguments
    }
    for name in _DATA:
        if arguments.get(name) is not None:
            facts[name] = of_data(arguments[name], job)
    if "callbacks" in arguments:
        facts["callbacks"] = [
            _of_callback(one)
            for one in callbacks_of(arguments["callbacks"])
            if isinstance(one, kinds)
        ]
    return facts


def of_data(data: Any, job: Job | None) -> Any:
    """Returns what must be equal on all workers of data, and in a run that goes on with them."""
    if isinstance(data, dict):
        return {str(name): of_data(one, job) for name, one in data.items()}
    if isinstance(data, list | tuple):
        if data and isinstance(data[0], bool | int | float | str):
            return of_array(np.asarray(data))
        return [of_data(one, job) for one in data]
    if isinstance(data, DistributedDataset):
        ours = equivalent(data)
        if job is None and isinstance(ours, DividedDataset):
            return of_data(ours.source, job)  # which a single replica has in its place
        return _kind_of(ours)
    if shards_itself(data, job):
        return "a part of a tf.data.Dataset"
    kind = _kind_of(data)
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


def _kind_of(data: object) -> str:
    return type(data).__name__


def _of_rows(data: Any) -> Any:
    if getattr(data, "dtype", None) is not None:
        return of_array(data)
    # A pandas DataFrame.
    facts = {"class": type(data).__name__, "shape": str(tuple(data.shape))}
    try:
        return {**facts, **of_array(data.to_numpy())}
    except Exception:  # noqa: BLE001  a table with columns that are no numbers
        return facts


def callbacks_of(callbacks: object) -> list[Any]:
    """Returns the callbacks in an argument of `fit`."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks.callbacks
    return keras.tree.flatten(callbacks) if callbacks else []


def _of_callback(callback: keras.callbacks.Callback) -> dict[str, Any]:
    # LearningRateWarmup keeps its target and start as `_given`.
    given = {*inspect.signature(type(callback).__init__).parameters, "given"}
    own = {
        # Keras changes the sign of `min_delta` when the first epoch ends.
        name: described(abs(value) if name == "min_delta" else value)
        for name, value in vars(callback).items()
        if name.removeprefix("_") in given and name not in _ARGUMENTS_LEFT_OUT
    }
    return {"class": type(callback).__name__, **own}
