"""Saves models under a strategy: which workers write files, and when the other workers wait.

If all workers save to one path, the chief writes the file and the others wait for it. If each
worker has a path of its own, or only one worker saves, each worker that saves writes its own file.
See ADR 15.

Models of KerasHub have further methods that write files. The method for Hugging Face's format puts
all weights into a dictionary at once, and writes the dictionary to a file. kerasdist lets this
method read symbolic tensors instead of variables. The dictionary then says how each entry of the
file is computed, and kerasdist computes and writes one entry after another, so that the full
weights are never in memory together. KerasHub's own code writes the other files.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import math
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import keras
import numpy as np

from kerasdist import keras_compat
from kerasdist.backends.base.model_trainer import trainer_of
from kerasdist.core import whole_files
from kerasdist.core.context import replaced_entries
from kerasdist.errors import UnsupportedError, VersionError

Original = Callable[..., Any]

_EXPORT, _ADAPTERS = "export_to_transformers", "save_lora_weights"
_EXPORTER = "keras_hub.src.utils.transformers.export.hf_exporter"
_WEIGHTS = "model.safetensors"
_TYPES = {
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    "bfloat16": "BF16",
    "uint8": "U8",
    "bool": "BOOL",
}


def save(
    original: Original, model: keras.Model, filepath: object, *args: object, **kwargs: object
) -> Any:
    """Calls Keras's function that writes a model, but only on the workers that must write it."""
    trainer = trainer_of(model)
    if trainer is None or not isinstance(filepath, str | os.PathLike):
        return original(model, filepath, *args, **kwargs)
    path = os.fspath(filepath)
    # Only kerasdist's callbacks pass a name that `replacing` has yielded, and only on the chief.
    if whole_files.is_unfinished(path):
        return original(model, filepath, *args, **kwargs)
    if not whole_files.is_remote(path):
        path = str(Path(path).absolute())

    job, function = trainer.replicas.job, original.__name__
    is_one_file = _is_one_file(function, *args, **kwargs)
    makes_folders = not is_one_file or kwargs.get("zipped") is False or whole_files.is_remote(path)
    all_read = trainer.replicas.reads_need_all_workers

    def write() -> None:
        # If the path is a link, `whole_files.replacing` writes to the link's target. So the folder
        # of the target is checked.
        if all_read and not (makes_folders or os.access(Path(path).resolve().parent, os.W_OK)):
            # The folder is not writable, so the write below will fail before it reads a variable.
            # The other workers wait for this worker's reads, so it reads the variables here.
            with tempfile.TemporaryDirectory() as folder:
                write_into(folder)
        try:
            write_whole()
        except OSError as error:
            if error.filename is not None or error.errno is None:
                raise
            why = os.strerror(error.errno)
            raise OSError(error.errno, f"{why}{_place_of(error)}, in", path) from error

    def write_whole() -> None:
        if function == "save_weights_only" and not (is_one_file or whole_files.is_remote(path)):
            # The files contain each other's names, so each file is written under its final name,
            # in a temporary folder. Then each new file replaces the old file of the same name.
            with tempfile.TemporaryDirectory(prefix="unfinished-", dir=Path(path).parent) as folder:
                write_into(folder)
                for file in Path(folder).iterdir():
                    file.replace(Path(path).with_name(file.name))
        elif not is_one_file or Path(path).is_dir():
            # No temporary name is used, because to replace a folder would remove other files in it.
            original(model, path, *args, **kwargs)
        else:
            with whole_files.replacing(path) as name:
                original(model, name, *args, **kwargs)

    def write_into(folder: str) -> None:
        original(model, str(Path(folder, Path(path).name)), *args, **kwargs)

    if job is None:
        write()
    elif job.is_chief:
        job.write_for_all(write, path)
    elif all_read:
        # The chief gathers sharded variables, in collectives of all workers. So this worker saves
        # too, to a temporary folder. If this worker cannot see the chief's file, it copies its own
        # files to the folder of the path.
        with tempfile.TemporaryDirectory() as folder:
            write_into(folder)
            if not job.is_written_by_chief(path):
                shutil.copytree(folder, Path(path).parent, dirs_exist_ok=True)
    elif not job.is_written_by_chief(path):
        write()
    return None


def _place_of(error: OSError) -> str:
    """Returns text that names the variable that Keras was writing when it raised `error`, or ""."""
    layer: Any = None
    entries: list[tuple[Any, str, Any]] = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        known = frame.f_locals
        if frame.f_code.co_name == "save_own_variables":  # public in Keras, so the name is stable
            layer = known.get("self")
        elif frame.f_code.co_name == "__setitem__" and layer is not None and "key" in known:
            entries.append((layer, str(known["key"]), known.get("value")))
    if not entries:
        return ""
    owner, key, value = entries[-1]
    # The key is usually the index of the variable in the layer. In layers that have adapters or are
    # quantized, it may be the index of another variable, so the shapes are compared, too.
    its = owner.variables[int(key)] if key.isdigit() and int(key) < len(owner.variables) else None
    if its is not None and tuple(its.shape) == np.shape(value):
        return f", at the variable {its.path!r}"
    return f", at entry {key!r} of the layer {getattr(owner, 'path', owner.name)!r}"


def refuse_save(
    original: Original, model: keras.Model, filepath: object, *args: object, **kwargs: object
) -> Any:
    """Refuses to save in a job, if Keras lacks the function that kerasdist replaces for saving.

    If kerasdist cannot replace the function, it cannot keep the other workers from writing.
    """
    trainer, internals = trainer_of(model), keras_compat.internals
    needed = internals.SAVE_MODEL if original.__name__ == "save" else internals.SAVE_WEIGHTS
    if needed is internals.SAVE_MODEL and str(filepath).endswith((".h5", ".hdf5", ".keras.h5")):
        needed = internals.SAVE_HDF5
    if trainer is not None and trainer.replicas.job is not None:
        needed.require()
    return original(model, filepath, *args, **kwargs)


def _is_one_file(function: str, *args: object, **kwargs: object) -> bool:
    """Returns whether a function of Keras writes a single file, at the path it is given."""
    if function == "save_weights_only":
        max_shard_size = args[0] if args else kwargs.get("max_shard_size")
        return max_shard_size is None
    return function != "export"


def hook(kind: type) -> None:
    """Makes a model class of KerasHub write its files only on the workers that must write them."""
    for name in (_EXPORT, _ADAPTERS) if hasattr(kind, _EXPORT) else ():
        for owner in kind.__mro__:
            original = vars(owner).get(name)
            if original is not None and not hasattr(original, "__wrapped__"):
                setattr(owner, name, _written(original))


def _written(original: Original) -> Original:
    def export(model: keras.Model, path: str) -> None:
        _export(original, model, path)

    write = export if original.__name__ == _EXPORT else original

    @functools.wraps(original)
    def method(model: keras.Model, path: str | os.PathLike[str]) -> None:
        if trainer_of(model) is None:
            original(model, path)
        else:
            save(write, model, path)

    return method


def _export(original: Original, model: keras.Model, path: str) -> None:
    for layer in keras_compat.flat_layers(model):
        mode = getattr(layer, "quantization_mode", None)
        if mode not in (None, "float8"):
            raise UnsupportedError(
                "Expected a model whose weights are floats, to export it to transformers. "
                f"Received: layer={layer.path!r}, quantized to {mode}. Write its adapters by "
                "`backbone.save_lora_weights`, load them by `load_lora_weights` into the model as "
                "it was before it was quantized, and export that model."
            )
    parent, symbols = Path(path).parent, _Symbols()
    parent.mkdir(parents=True, exist_ok=True)
    # KerasHub writes to a temporary folder, because the file of weights that it writes here has no
    # weights. `_write` replaces this file before the files are moved to `path`.
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=parent) as folder:
        with _without_weights(model, symbols) as entries:
            original(model, folder)
        _write(Path(folder, _WEIGHTS), entries, symbols)
        Path(path).mkdir(exist_ok=True)
        for file in Path(folder).iterdir():
            shutil.move(file, Path(path, file.name))


@final
class _Seen:
    """Stands for a layer, with symbolic tensors in place of its variables.

    If LoRA is enabled, a read of the layer's weight returns the weight plus the adapters' product.
    """

    def __init__(self, layer: keras.Layer, symbols: _Symbols) -> None:
        self._layer = layer
        self._symbols = symbols

    @property
    def __class__(self) -> Any:
        return type(self._layer)

    def __getattr__(self, name: str) -> object:
        layer, symbols = self._layer, self._symbols
        if not getattr(layer, "lora_enabled", False):
            return symbols.of(getattr(layer, name))
        merged = "kernel" if hasattr(layer, "lora_kernel_a") else "embeddings"
        if name == merged:
            return getattr(type(layer), name).fget(self)
        found = symbols.of(getattr(layer, name))
        if name == "weights" and isinstance(found, list):  # LoRA adapts the first weight
            return [getattr(self, merged), *found[1:]]
        return found


@final
class _Symbols:
    """Makes one symbolic tensor for each variable.

    Attributes:
        variables: The variables that have a symbolic tensor, by the id of this tensor.
    """

    def __init__(self) -> None:
        self.variables: dict[int, keras.Variable] = {}
        self._known: dict[int, keras.KerasTensor] = {}

    def of(self, value: object) -> object:
        """Returns `value` with a symbolic tensor in place of each variable.

        This includes variables in lists and in layers, and those that a layer's methods return.
        """
        if isinstance(value, keras.Variable):
            symbol = self._known.get(id(value))
            if symbol is None:
                symbol = keras.KerasTensor(tuple(value.shape), keras_compat.stored_dtype(value))
                self._known[id(value)], self.variables[id(symbol)] = symbol, value
            return symbol
        if isinstance(value, keras.Layer):
            return _Seen(value, self)
        if isinstance(value, list | tuple):
            return [self.of(one) for one in value]
        if inspect.ismethod(value):
            return lambda *args, **kwargs: self.of(value(*args, **kwargs))
        return value


@contextmanager
def _without_weights(
    model: keras.Model, symbols: _Symbols
) -> Iterator[dict[str, keras.KerasTensor]]:
    """Keeps KerasHub from writing weights in the block, and yields a dictionary.

    When KerasHub exports a model in the block, the dictionary gets the weights that KerasHub would
    write, by name, as symbolic tensors.
    """
    kind = type(getattr(model, "backbone", model)).__name__
    try:
        exporters = importlib.import_module(_EXPORTER).MODEL_EXPORTERS
    except (ImportError, AttributeError) as error:
        raise VersionError(
            f"Expected KerasHub to have {_EXPORTER}.MODEL_EXPORTERS, which kerasdist needs to "
            f"export models of a strategy. Received: {error}. Install keras-hub==0.32."
        ) from error
    known, entries = exporters.get(kind), dict[str, keras.KerasTensor]()

    def note(backbone: object, **options: object) -> dict[str, object]:
        entries.update(known(symbols.of(backbone), **options))
        return {"none": keras.ops.zeros((1,))}

    # If KerasHub has no exporter for the model, nothing is replaced, and KerasHub raises an error.
    with replaced_entries(exporters, {} if known is None else {kind: note}):
        yield entries


def _write(path: Path, entries: Mapping[str, keras.KerasTensor], symbols: _Symbols) -> None:
    """Writes a file of safetensors, whose entries are computed one by one.

    Source: https://github.com/huggingface/safetensors#format
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in entries.items():
        begin, end = end, end + math.prod(entry.shape) * np.dtype(entry.dtype).itemsize
        kind, shape = _TYPES[entry.dtype], list(entry.shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.unlink()  # KerasHub's file may have unusual permissions, a new file has the usual ones
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, entry in entries.items():
            value = keras_compat.value_of(entry, lambda one: symbols.variables[id(one)])
            array = keras.ops.convert_to_numpy(keras.ops.cast(value, entry.dtype))
            try:
                np.ascontiguousarray(array).reshape(-1).view(np.uint8).tofile(file)
            except OSError as error:
                raise OSError(f"{error}, at the entry {name!r} in '{path}'") from error
