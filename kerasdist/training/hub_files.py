"""Files that models of KerasHub write by methods of their own, in a job and of sharded variables.

For the format of Hugging Face, KerasHub makes a dictionary of all weights, and then a file of it.
Here it sees symbols in the place of variables, so that the dictionary says how each entry is made,
and one after another is made and written. KerasHub's own code writes the other files.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import keras
import numpy as np

from kerasdist import keras_compat
from kerasdist.backends.base.model_trainer import trainer_of
from kerasdist.errors import UnsupportedError
from kerasdist.training import saving

_EXPORT, _ADAPTERS = "export_to_transformers", "save_lora_weights"
_EXPORTER = "keras_hub.src.utils.transformers.export.hf_exporter"
_WEIGHTS = "model.safetensors"
_TYPES = {
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{"bfloat16": "BF16", "uint8": "U8", "bool": "BOOL"},
}


def hook(kind: type) -> None:
    """Lets a class of KerasHub write its files so."""
    for name in (_EXPORT, _ADAPTERS) if hasattr(kind, _EXPORT) else ():
        for owner in kind.__mro__:
            original = vars(owner).get(name)
            if original is not None and not hasattr(original, "__wrapped__"):
                setattr(owner, name, _written(original))


def _written(original: Callable[..., None]) -> Callable[..., None]:
    def export(model: Any, path: str) -> None:
        _export(original, model, path)

    write = export if original.__name__ == _EXPORT else original

    @functools.wraps(original)
    def method(model: Any, path: Any) -> None:
        if trainer_of(model) is None:
            original(model, path)
        else:
            saving.save(write, model, path)

    return method


def _export(original: Callable[..., None], model: Any, path: str) -> None:
    _require_floats(model)
    parent = Path(path).parent
    parent.mkdir(parents=True, exist_ok=True)
    # In a folder of its own first: KerasHub's file has no weights.
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=parent) as folder:
        symbols = _Symbols()
        with _without_weights(model, symbols) as entries:
            original(model, folder)
        _write(Path(folder, _WEIGHTS), entries, symbols)
        Path(path).mkdir(exist_ok=True)
        for file in Path(folder).iterdir():
            shutil.move(file, Path(path, file.name))


def _require_floats(model: Any) -> None:
    for layer in keras_compat.flat_layers(model):
        mode = getattr(layer, "quantization_mode", None)
        if mode not in (None, "float8"):
            raise UnsupportedError(
                "Expected a model whose weights are floats, to export it to transformers. "
                f"Received: layer={layer.path!r}, quantized to {mode}. Write its adapters by "
                "`backbone.save_lora_weights`, load them into the model that was quantized, "
                "before its quantization, by `load_lora_weights`, and export that one."
            )


@final
class _Seen:
    """A layer in which symbols stand for variables; with adapters, they stand for merged ones."""

    def __init__(self, layer: Any, symbols: _Symbols) -> None:
        self._layer = layer
        self._symbols = symbols

    @property
    def __class__(self) -> Any:
        return type(self._layer)

    def __getattr__(self, name: str) -> Any:
        layer, symbols = self._layer, self._symbols
        if not getattr(layer, "lora_enabled", False):
            return symbols.of(getattr(layer, name))
        merged = "kernel" if hasattr(layer, "lora_kernel_a") else "embeddings"
        if name == merged:
            return getattr(type(layer), name).fget(self)
        found = symbols.of(getattr(layer, name))
        if name == "weights":  # of which the first is the one beside which the adapters are
            return [getattr(self, merged), *found[1:]]
        return found


@final
class _Symbols:
    """The symbols of variables.

    Attributes:
        variables: Those that have one, by its id.
    """

    def __init__(self) -> None:
        self.variables: dict[int, Any] = {}
        self._known: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        """Returns a value with symbols in the place of variables, and of those in layers."""
        if isinstance(value, keras.Variable):
            if id(value) not in self._known:
                dtype = keras_compat.stored_dtype(value)
                self._known[id(value)] = keras.KerasTensor(tuple(value.shape), dtype)
                self.variables[id(self._known[id(value)])] = value
            return self._known[id(value)]
        if isinstance(value, keras.Layer):
            return _Seen(value, self)
        if isinstance(value, list | tuple):
            return [self.of(one) for one in value]
        if inspect.ismethod(value):
            return lambda *args, **kwargs: self.of(value(*args, **kwargs))
        return value


@contextmanager
def _without_weights(model: Any, symbols: _Symbols) -> Iterator[dict[str, Any]]:
    """Lets KerasHub write no weights; yields what it would, by its names, in symbols."""
    kind = type(getattr(model, "backbone", model)).__name__
    exporters = importlib.import_module(_EXPORTER).MODEL_EXPORTERS
    known, entries = exporters.get(kind), dict[str, Any]()

    def note(backbone: object, **options: object) -> dict[str, Any]:
        entries.update(known(symbols.of(backbone), **options))
        return {"none": keras.ops.zeros((1,))}

    if known is not None:  # KerasHub refuses the others
        exporters[kind] = note
    try:
        yield entries
    finally:
        if known is not None:
            exporters[kind] = known


def _write(path: Path, entries: Mapping[str, Any], symbols: _Symbols) -> None:
    """Writes a file of safetensors, whose entries are made one by one.

    Source: https://github.com/huggingface/safetensors#format
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in entries.items():
        begin, end = end, end + math.prod(entry.shape) * np.dtype(entry.dtype).itemsize
        kind, shape = _TYPES[entry.dtype], list(entry.shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries.values():
            value = keras_compat.value_of(entry, lambda one: symbols.variables[id(one)])
            array = np.ascontiguousarray(keras.ops.convert_to_numpy(value))
            array.reshape(-1).view(np.uint8).tofile(file)
