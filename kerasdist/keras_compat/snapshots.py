"""Copies of a model's state, which Keras writes into a file later, in another thread.

Keras's own code runs twice: now up to the values of the model, whose copies take the place of the
file, and later for the file, where the copies take the place of the model.
"""

from __future__ import annotations

import shutil
import threading
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any, final

import keras
import numpy as np
from keras.src.saving import saving_lib

from kerasdist.keras_compat.models import ops
from kerasdist.keras_compat.patches import install

Memory = defaultdict[Any, list[np.ndarray[Any, Any]]]
"""Arrays that no copy uses any more, by shape and type.

To get new memory from the system takes several times as long as to copy (ADR 42).
"""


@final
class Snapshot:
    """What ``model.save``, or ``model.save_weights``, would write now.

    It takes its arrays from a memory, and gives them back when they are written.
    """

    def __init__(self, model: Any, memory: Memory, *, weights_only: bool) -> None:
        """Copies the state to the host. All workers must call it where reads need all workers."""
        _install()
        self._model = model
        self._save = keras.Model.save_weights if weights_only else keras.Model.save
        self._texts = None if weights_only else saving_lib._serialize_model_as_json(model)
        self._assets = None if weights_only else saving_lib.DiskIOStore("assets", mode="w")
        self._values = _Copies(memory)
        try:
            saving_lib._save_state(model, self._values, self._assets, "", set())
        except BaseException:
            self.discard()
            raise

    def write(self, path: str) -> None:
        """Writes the file, once."""
        _writing.snapshot = self
        try:
            self._save(self._model, path)
        finally:
            _writing.snapshot = None
            self.discard()

    def discard(self) -> None:
        """Removes the temporary files."""
        if self._assets is not None:
            self._assets.close()

    @property
    def texts(self) -> tuple[str, str] | None:
        """The model's config and metadata, as JSON."""
        return self._texts

    def fill(self, weights_store: Any, assets_store: Any) -> None:
        """Moves the copies into an open file."""
        for path, metadata, values in self._values.groups:
            group = weights_store.make(path, metadata=metadata)
            for name, array in values.items():
                group[name] = array
                self._values.memory[array.shape, array.dtype].append(array)
        if self._assets is not None:
            source, target = self._assets.working_dir, assets_store.working_dir
            shutil.copytree(source, target, dirs_exist_ok=True)


@final
class _Copies(saving_lib.H5IOStore):
    """Stands for the file of the weights, and keeps copies.

    Attributes:
        memory: Arrays to copy into.
        groups: Path, metadata and values of each group of the file, in order.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.groups: list[tuple[str, Any, _Group]] = []

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: Any = None) -> Any:
        group = _Group(self.memory)
        self.groups.append((path, metadata, group))
        return group


@final
class _Group(dict[str, Any]):
    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory

    def __setitem__(self, name: str, value: Any) -> None:
        array = value if isinstance(value, np.ndarray) else ops.convert_to_numpy(value)
        spare = self._memory[array.shape, array.dtype]
        if spare:
            copy = spare.pop()
            np.copyto(copy, array)
            array = copy
        elif array is value or not array.flags.owndata:
            array = array.copy()
        super().__setitem__(name, array)


@final
class _Writing(threading.local):
    snapshot: Snapshot | None = None


_writing = _Writing()


@cache
def _install() -> None:
    install(model_as_json=_texts, save_state=_save_state)


def _texts(original: Callable[..., Any], model: Any) -> Any:
    snapshot = _writing.snapshot
    return original(model) if snapshot is None else snapshot.texts


def _save_state(
    original: Callable[..., None],
    saveable: Any,
    weights_store: Any,
    assets_store: Any,
    *where: Any,
    **options: Any,
) -> None:
    snapshot = _writing.snapshot
    if snapshot is None:
        original(saveable, weights_store, assets_store, *where, **options)
    else:
        snapshot.fill(weights_store, assets_store)
