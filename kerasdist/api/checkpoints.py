"""Saves and loads a model's variables as checkpoints in the formats of the frameworks.

A checkpoint has the same tree as ``keras.Model.get_state_tree``: four groups, such as
``trainable_variables``, and in each group nested dictionaries, whose keys are the parts of the
variables' paths. `load_checkpoint` also reads checkpoints of other programs, which may have no such
groups, or other names in front of the variables' paths.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import keras

from kerasdist import keras_compat
from kerasdist.backends import registry
from kerasdist.backends.base.interface import CheckpointFormat, Key, ReplicaSet
from kerasdist.backends.base.model_trainer import replicas_of
from kerasdist.backends.base.variable_rules import is_on_read
from kerasdist.core import whole_files
from kerasdist.job.comparison import NAMED, first_of
from kerasdist.job.job import Job, all_do, translating_failures

_OPTIMIZER = ("optimizer_variables", "optimizer")
_GROUPS = (*_OPTIMIZER, "trainable_variables", "non_trainable_variables", "model")
# In the `state_dict` of a Keras model on PyTorch, this name comes before a variable's path.
_IN_STATE_DICT = "_torch_params."


def save_checkpoint(model: keras.Model, path: str | os.PathLike[str]) -> None:
    """Writes a model's variables as a checkpoint in the framework's own format.

    All workers must call this function. On JAX the checkpoint has the format of Orbax (the package
    ``orbax-checkpoint``), on PyTorch the format of ``torch.distributed.checkpoint``. Each worker
    writes the shards that it holds. The checkpoint has the tree of ``model.get_state_tree()``, so
    programs without kerasdist can read the checkpoint. The checkpoint does not contain the position
    in the data, the epoch or the state of callbacks: to restart a run, use
    `kerasdist.callbacks.BackupAndRestore`.

    Example::

        kd.save_checkpoint(model, "checkpoints/1")

    Args:
        model: A built model, made in a strategy's scope or not.
        path: The folder to write, which all workers must see. An existing checkpoint is replaced
            when the new one is complete. On storage such as ``gs://`` no checkpoint can be
            replaced, so nothing may exist at the path.

    Raises:
        UnsupportedError: If the backend is TensorFlow, or Orbax is not installed.
        ValueError: If the model is not built, if two of its variables have the same path, if
            something that is not a checkpoint is at `path`, or if some worker does not see the
            folder.
    """
    form, replicas, job = _prepare(model)
    tree: dict[str, Any] = {
        "trainable_variables": _nested(model.trainable_variables),
        "non_trainable_variables": _nested(model.non_trainable_variables),
        "optimizer_variables": _nested(keras_compat.slots_of(model)),
        "metrics_variables": _nested(model.metrics_variables),
    }
    if whole_files.is_remote(path):
        with translating_failures(f"checkpoint {path}"):
            form.save(os.fspath(path), tree, replicas)
        return
    path = Path(os.path.realpath(path))
    unfinished = path.with_name(f"unfinished-{path.name}")
    before, new = unfinished / "replaced", unfinished / path.name
    writes = job is None or job.is_chief
    with all_do(job, "make a folder for a checkpoint", ValueError):
        if writes:
            # If only the old checkpoint is left, an earlier process was killed between the two
            # `rename` calls at the end of this function. Then the old checkpoint is put back.
            if before.exists() and not path.exists():
                before.rename(path)
            if path.exists() and form.folder_in(path) is None:
                raise ValueError(
                    f"Expected a new folder, or a checkpoint to replace. Received: path='{path}'."
                )
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            # This write tests whether the disk is full. If it is, the write fails, and all workers
            # raise the error. Without this test, only the chief would raise the error.
            new.write_bytes(bytes(1 << 12))
            new.unlink()
    with all_do(job, "see the folder of a checkpoint", ValueError):
        if not unfinished.is_dir():
            raise ValueError(
                f"Expected a folder that all workers see. Received: path='{path}', where this "
                "worker does not see what the chief writes."
            )
    try:
        with translating_failures(f"checkpoint {path}"):
            form.save(str(new), tree, replicas)
    except Exception as error:
        if writes:
            shutil.rmtree(unfinished, ignore_errors=True)
        error.add_note(
            f"kerasdist: this error came while '{new}' was written. What was at '{path}' before is "
            "unchanged. Call save_checkpoint again when the cause is gone."
        )
        raise
    with all_do(job, "put a new checkpoint in its place", ValueError):
        if writes:
            if path.exists():
                path.rename(before)
            new.rename(path)
            whole_files.flush(path.parent)
            shutil.rmtree(unfinished)


def load_checkpoint(
    model: keras.Model, path: str | os.PathLike[str], *, weights_only: bool = False
) -> None:
    """Loads a checkpoint in the framework's own format into a model.

    All workers must call this function. Each worker reads the shards that it holds. The checkpoint
    may come from:

    - `save_checkpoint`, with any number of workers and any sharding;
    - a program without kerasdist that saved ``model.get_state_tree()``, or a dictionary of
      variables by their paths;
    - ``keras.callbacks.OrbaxCheckpoint`` (pass the folder of a step);
    - on PyTorch, a program that saved ``{"model": model.state_dict()}``.

    Variables are found by their paths, so layers need the same names as in the saved model. All
    shapes are compared before the first variable changes. Entries of the checkpoint that belong to
    no variable of the model are ignored.

    Example::

        kd.load_checkpoint(model, "checkpoints/1")
        model.fit(x, y, epochs=1)

    Args:
        model: A built model, made in a strategy's scope or not.
        path: The checkpoint's folder, which all workers must see, or its address on storage such as
            ``gs://``.
        weights_only: Whether to load only weights, so that the optimizer keeps its state. The
            optimizer also keeps its state if the checkpoint has no state of an optimizer.

    Raises:
        UnsupportedError: If the backend is TensorFlow, or Orbax is not installed.
        ValueError: If the model is not built, or the checkpoint does not fit the model. In this
            case, no variable has changed.
    """
    form, replicas, job = _prepare(model)
    with all_do(job, "read the shapes of a checkpoint", ValueError):
        folder, shapes = _shapes_in(path, form)
    weights, slots = dict[str, Key](), dict[str, Key]()
    for key in shapes:
        if key[0] != "metrics_variables":
            (slots if key[0] in _OPTIMIZER else weights)[_path_of(key)] = key
    wanted = [(model.weights, weights, True)]
    # `non_trainable_variables` also has the states of seed generators, which `model.weights` leaves
    # out and a checkpoint may lack. It also has the variables of metrics, which are not loaded.
    rest = [one for one in model.non_trainable_variables if not is_on_read(one)]
    wanted.append((rest, weights, False))
    if slots and not weights_only:
        wanted.append((keras_compat.slots_of(model), slots, True))
    pairs: dict[int, tuple[Key, keras.Variable]] = {}
    wrong: list[str] = []
    for variables, known, is_needed in wanted:
        for variable in variables:
            key = known.get(variable.path)
            if key is not None and shapes[key] == tuple(variable.shape):
                pairs[id(variable)] = key, variable
            elif key is not None:
                wrong.append(
                    f"{variable.path!r} of shape {tuple(variable.shape)}, which is {shapes[key]} "
                    "there"
                )
            elif is_needed:
                wrong.append(f"{variable.path!r}, which is not there")
    with all_do(job, "find all variables of the model in a checkpoint", ValueError):
        wrong += form.lacking(folder, {key: one.path for key, one in pairs.values()})
        if wrong:
            raise ValueError(
                f"Expected a checkpoint with all variables of model={model.name!r}, in their "
                f"shapes. Received: path={folder!r}, which does not fit {first_of(wrong)}; it has "
                f"{[*weights, *slots][:NAMED]}. No variable has changed. Make the same model as "
                "the one that was saved, with the same names of layers, or leave out the "
                "optimizer by weights_only=True."
            )
    if replicas is not None:
        replicas.initial_broadcast.ensure()
    try:
        with translating_failures(f"checkpoint {path}"):
            form.load(folder, [*pairs.values()], replicas)
    except Exception as error:
        error.add_note(
            f"kerasdist: this error came while '{folder}' was read. Some variables of model="
            f"{model.name!r} already have the new values. Load another checkpoint."
        )
        raise


def _prepare(model: keras.Model) -> tuple[CheckpointFormat, ReplicaSet | None, Job | None]:
    """Returns the backend's format of checkpoints, the model's replicas, and the replicas' job."""
    keras_compat.require_built(model)
    replicas = replicas_of(model)
    job = None if replicas is None else replicas.job
    return registry.current().checkpoint_format(), replicas, job


def _shapes_in(
    path: str | os.PathLike[str], form: CheckpointFormat
) -> tuple[str, Mapping[Key, tuple[int, ...]]]:
    """Returns the folder in which a checkpoint has its arrays, and each array's shape."""
    found = path if whole_files.is_remote(path) else form.folder_in(Path(os.path.realpath(path)))
    if found is None:
        inside = sorted(one.name for one in Path(path).glob("*"))[:NAMED]
        raise ValueError(
            f"Expected a checkpoint, which has a file {form.marker!r}. Received: "
            f"path={os.fspath(path)!r}, with {inside}. Name the folder of one step."
        )
    folder = os.fspath(found)
    try:
        return folder, form.shapes(folder)
    except Exception as error:
        raise ValueError(
            f"Expected a checkpoint that is whole. Received: path={folder!r}, where the shapes of "
            f"its arrays cannot be read: {type(error).__name__}: {error}. No variable has changed. "
            "Load another checkpoint."
        ) from error


def _nested(variables: Iterable[keras.Variable]) -> dict[str, Any]:
    """Returns nested dictionaries of variables; the keys are the parts of the variables' paths."""
    tree: dict[str, Any] = {}
    for variable in variables:
        *parts, name = variable.path.split("/")
        branch = tree
        for part in parts:
            branch = branch.setdefault(part, {})
        if name in branch:
            raise ValueError(
                "Expected each variable to have a path of its own, by which a checkpoint names it. "
                f"Received: path={variable.path!r} twice. Give the layers names of their own."
            )
        branch[name] = variable
    return tree


def _path_of(key: Key) -> str:
    """Returns the path of the variable whose array is at `key` in a checkpoint's tree."""
    own = key[1:] if key[0] in _GROUPS else key
    return "/".join(own).rpartition(_IN_STATE_DICT)[2]
