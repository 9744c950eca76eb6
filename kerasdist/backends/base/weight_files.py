"""Compares a weight file with a sharded model before the file is loaded.

So a file that does not fit the model changes no weight.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any, final

import keras
import numpy as np

from kerasdist import keras_compat
from kerasdist.backends.base.model_trainer import replicas_of
from kerasdist.core.context import current, replaced
from kerasdist.job.comparison import first_of
from kerasdist.keras_compat.internals import READ_WEIGHT, WEIGHTS_OF_LAYER

_FORMATS = (".weights.h5", ".weights.json")
_NEEDED = (READ_WEIGHT, WEIGHTS_OF_LAYER)


@final
class _Comparison:
    """The result of comparing a weight file with a model.

    Attributes:
        file: The file that was read last. Keras may save a model in several files.
        met: The ids of the variables for which the file has a value.
        others: A description of each variable for which the file has a value of another shape.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.met: set[int] = set()
        self.others: list[str] = []


@cache
def install() -> None:
    """Makes Keras compare each weight file with a sharded model before it loads the file."""
    keras_compat.install(load_weights=_load, read_weight=_read)


def is_compared(variable: keras.Variable, value: Any) -> bool:
    """Returns whether a weight file is only being compared with a model, and not loaded.

    During a comparison, the caller must not assign the value. This function then records that the
    file has a value for the variable, and whether its shape differs from that of the variable.
    """
    comparison: _Comparison | None = current.comparison
    if comparison is None:
        return False
    comparison.met.add(id(variable))
    shape, found = tuple(variable.shape), tuple(np.shape(value))
    if shape != found:
        comparison.others.append(
            f"{variable.path!r} of shape {shape}, which is {found} in {comparison.file!r}"
        )
    return True


def _read(original: Callable[..., object], store: object, key: str) -> object:
    """Reads a weight from a file.

    While a file is only compared with a model, the values do not matter. So this function then
    returns zeros of the weight's shape, which take no memory, and does not read the values.
    """
    if current.comparison is None:
        return original(store, key)
    weight = WEIGHTS_OF_LAYER.of(store)[key]
    current.comparison.file = weight.file.filename
    return np.broadcast_to(np.zeros((), weight.dtype), weight.shape)


def _load(
    original: Callable[..., object],
    model: keras.Model,
    filepath: str | os.PathLike[str],
    skip_mismatch: bool = False,
    **options: object,
) -> object:
    replicas, file = replicas_of(model), str(filepath)
    is_divided = replicas is not None and replicas.options.sharding is not None
    is_known = file.endswith(_FORMATS) and "://" not in file and model.built
    if is_divided and is_known and not skip_mismatch and all(one.is_there() for one in _NEEDED):
        _compare(original, model, file, options)
    return original(model, filepath, skip_mismatch, **options)


def _compare(
    load: Callable[..., object], model: keras.Model, file: str, options: dict[str, object]
) -> None:
    """Raises a ValueError if a file lacks a weight of a model, or has it in another shape."""
    comparison, failure = _Comparison(file), None
    with replaced(current, "comparison", comparison):
        try:
            load(model, file, **options)
        except ValueError as error:
            failure = error
    wrong = comparison.others
    if failure is not None:
        lacking = [one.path for one in model.weights if id(one) not in comparison.met]
        wrong = [*wrong, *(f"{path!r}, whose layer lacks weights in {file!r}" for path in lacking)]
    if wrong:
        raise ValueError(
            f"Expected a file with all weights of model={model.name!r}, in their shapes. Received: "
            f"filepath={file!r}, which does not fit {first_of(wrong)}. No weight "
            "has changed. Make the same model as the one that was saved, or load what fits with "
            "skip_mismatch=True."
        ) from failure
    if failure is not None:
        raise failure


def name_tensor(error: BaseException) -> None:
    """Adds a note to an error of KerasHub's safetensors loader.

    The loader converts the tensors of a Hugging Face folder one by one. Its errors do not say which
    tensor failed, in which file, and for which variable. The note names these three.
    """
    known: dict[str, Any] = {"self": None, "keras_variable": None}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").startswith("keras_hub."):
            known |= frame.f_locals
    loader, key = known["self"], known.get("hf_weight_key")
    if key is None or type(loader).__name__ != "SafetensorLoader":
        return
    index, variable = loader.safetensor_config, known["keras_variable"]
    name = known.get("fname") or loader.fname or "model.safetensors"
    if index is not None:
        files = {full: file for full, file in index["weight_map"].items() if full.endswith(key)}
        name = next(iter(files.values()), "model.safetensors.index.json")
    whose = ""
    if variable is not None:
        whose = f"; it is for the variable {variable.path!r} of shape {tuple(variable.shape)}"
    error.add_note(
        f"kerasdist: this was the tensor {key!r} of '{loader.preset}/{name}'"
        f"{whose}. Choose a folder that has it in that shape."
    )
