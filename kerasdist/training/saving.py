"""Saving in a job: the file is complete, whichever workers call `save`.

If all workers save to one path, the chief writes the file and the others wait for it. If each
worker has its own path, or only one worker saves, a worker that saves writes its own file. See ADR
15.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from kerasdist import keras_compat
from kerasdist.backends.base.model_trainer import trainer_of
from kerasdist.core import whole_files

Original = Callable[..., Any]


def save(
    original: Original, model: keras.Model, filepath: object, *args: object, **kwargs: object
) -> Any:
    """Calls Keras's function that writes a model, but only on the workers that must write it."""
    trainer = trainer_of(model)
    job = None if trainer is None else trainer.replicas.job
    if job is None or not isinstance(filepath, str | os.PathLike):
        return original(model, filepath, *args, **kwargs)
    path = os.fspath(filepath)
    # a callback of kerasdist saves on the chief alone
    if whole_files.is_unfinished(path):
        return original(model, filepath, *args, **kwargs)
    if not whole_files.is_remote(path):
        path = str(Path(path).absolute())

    is_one_file = _is_one_file(original.__name__, *args, **kwargs)
    makes_folders = not is_one_file or kwargs.get("zipped") is False or whole_files.is_remote(path)
    all_read = trainer is not None and trainer.replicas.reads_need_all_workers

    def write() -> None:
        # `replacing` writes to the target of a link, so the target's folder is checked.
        if all_read and not (makes_folders or os.access(Path(path).resolve().parent, os.W_OK)):
            # Writing fails below before any read, but the other workers wait in their reads.
            with tempfile.TemporaryDirectory() as folder:
                write_into(folder)
        if not is_one_file or Path(path).is_dir():
            # No temporary name is used, because to replace a folder would remove other files in it.
            original(model, path, *args, **kwargs)
            return
        with whole_files.replacing(path) as name:
            original(model, name, *args, **kwargs)

    def write_into(folder: str) -> None:
        original(model, str(Path(folder, Path(path).name)), *args, **kwargs)

    if job.is_chief:
        job.write_for_all(write, path)
    elif all_read:
        # This worker takes part in the chief's reads.
        # The worker's own copy is used if the worker cannot see the chief's file.
        with tempfile.TemporaryDirectory() as folder:
            write_into(folder)
            if not job.is_written_by_chief(path):
                shutil.copytree(folder, Path(path).parent, dirs_exist_ok=True)
    elif not job.is_written_by_chief(path):
        write()
    return None


def refuse_save(
    original: Original, model: keras.Model, filepath: object, *args: object, **kwargs: object
) -> Any:
    """Refuses to save in a job if Keras lacks the hook by which only one worker writes."""
    trainer, internals = trainer_of(model), keras_compat.internals
    needed = internals.SAVE_MODEL if original.__name__ == "save" else internals.SAVE_WEIGHTS
    if needed is internals.SAVE_MODEL and str(filepath).endswith((".h5", ".hdf5", ".keras.h5")):
        needed = internals.SAVE_HDF5
    if trainer is not None and trainer.replicas.job is not None:
        needed.require()
    return original(model, filepath, *args, **kwargs)


def _is_one_file(function: str, *args: object, **kwargs: object) -> bool:
    """Returns whether a function of Keras writes only the path that its argument names."""
    if function == "save_weights_only":
        max_shard_size = args[0] if args else kwargs.get("max_shard_size")
        return max_shard_size is None
    return function != "export"
