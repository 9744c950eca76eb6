"""Copies of a model's state, which another thread writes to a file later.

Keras's own code walks through the model when a snapshot is made, and writes to memory in place of a
file. The file that is later made from these copies has the same layout as Keras's own file.
"""

from __future__ import annotations

import tempfile
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any, final

import keras
import numpy as np

from kerasdist.core import whole_files
from kerasdist.core.internals import require_all, with_base
from kerasdist.errors import VersionError
from kerasdist.keras_compat import internals
from kerasdist.keras_compat.models import ops

Memory = defaultdict[Any, list[np.ndarray[Any, Any]]]
"""Arrays of earlier snapshots, by shape and type, which later snapshots reuse.

Getting new memory from the system takes several times as long as the copy itself (ADR 42).
"""

# The names of the members of a ``.keras`` file.
_METADATA, _CONFIG, _WEIGHTS, _ASSETS = "metadata.json", "config.json", "model.weights.h5", "assets"


def why_no_snapshots() -> VersionError | None:
    """Returns an error if Keras lacks an internal that snapshots need; otherwise None."""
    try:
        require_all(internals, internals.SAVE_ASYNC)
    except VersionError as error:
        return error
    return None


@final
class Snapshot:
    """What ``model.save`` or ``model.save_weights`` would write when the snapshot is made.

    The snapshot takes arrays from `memory`, and puts them back after their values are written.
    """

    def __init__(self, model: keras.Model, memory: Memory, *, weights_only: bool) -> None:
        """Copies the model's state to the host.

        If reading the state needs collectives, all workers must make the snapshot.
        """
        assets = None if weights_only else internals.ASSETS_FILE.value
        self._texts = None if weights_only else internals.SERIALIZE_MODEL.value(model)
        self._assets: Any = None if assets is None else assets(_ASSETS, mode="w")
        self._fits_in_memory = weights_only or internals.FITS_IN_MEMORY.value(model)
        self._values: _Copies = with_base(_Copies, internals.WEIGHTS_FILE.value)(memory)
        try:
            internals.SAVE_STATE.value(model, self._values, self._assets, "", set())
        except BaseException:
            self.discard()
            raise

    def write(self, path: str) -> None:
        """Writes the file. Call this method only once.

        A remote file is first written on this machine, and then copied.
        """
        try:
            if not whole_files.is_remote(path):
                with whole_files.replacing(path) as unfinished:
                    self._write(Path(unfinished))
                return
            with tempfile.TemporaryDirectory() as folder:
                here = Path(folder, Path(path).name)
                self._write(here)
                internals.COPY_FILE.value(str(here), path)
        finally:
            self.discard()

    def discard(self) -> None:
        """Removes the temporary files of the snapshot's assets."""
        if self._assets is not None:
            self._assets.close()

    def _write(self, path: Path) -> None:
        file = internals.WEIGHTS_FILE.value
        if self._texts is None or self._assets is None:
            self._write_weights(file(path, mode="w"))
            return
        config, metadata = self._texts
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(_METADATA, metadata)
            archive.writestr(_CONFIG, config)
            # Keras makes the file of weights in memory if it fits, else on disk. The same is done
            # here, because HDF5 gives a file that is made in memory another layout.
            if self._fits_in_memory:
                self._write_weights(file(_WEIGHTS, archive=archive, mode="w"))
            else:
                with tempfile.NamedTemporaryFile(dir=path.parent) as weights:
                    self._write_weights(file(weights.name, mode="w"))
                    archive.write(weights.name, _WEIGHTS)
            self._assets.archive = archive  # to which `close` writes the assets
            try:
                self._assets.close()
            finally:
                self._assets.archive = None

    def _write_weights(self, store: Any) -> None:
        """Writes the copies to a file of weights and closes it."""
        try:
            for inner_path, metadata, values in self._values.groups:
                group = store.make(inner_path, metadata=metadata)
                for name, array in values.items():
                    group[name] = array
                    self._values.memory[array.shape, array.dtype].append(array)
        finally:
            store.close()


@final
class _Copies:
    """Takes the place of Keras's weights file while a model is saved, and stores copies instead.

    Attributes:
        memory: The arrays into which values are copied.
        groups: The path, the metadata and the values of each group of the file, in order.
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
