"""Checkpoints by torch.distributed.checkpoint: each process writes and reads its own shards."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import keras
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

from kerasdist import keras_compat
from kerasdist.backends.base.interface import CheckpointFormat, Key, ReplicaSet
from kerasdist.backends.base.variable_rules import is_on_read
from kerasdist.backends.torch.state import shards
from kerasdist.core import whole_files


@final
class DcpFormat(CheckpointFormat):
    """Checkpoints in the format of torch.distributed.checkpoint."""

    marker = ".metadata"

    def shapes(self, path: str) -> Mapping[Key, tuple[int, ...]]:
        """Returns the shapes of a checkpoint's tensors."""
        names, metadata = _read(path)
        entries = metadata.state_dict_metadata
        return {
            key: tuple(entries[name].size)
            for key, name in names.items()
            if isinstance(entries[name], dcp.TensorStorageMetadata)
        }

    def lacking(self, path: str, wanted: Mapping[Key, str]) -> list[str]:
        """Describes each wanted variable whose values are in a file that is missing or too short.

        Returns an empty list if `path` is remote, because then the files' sizes are not looked up.
        """
        if whole_files.is_remote(path):
            return []
        names, metadata = _read(path)
        variables = {names[key]: variable for key, variable in wanted.items()}
        sizes = {file.name: file.stat().st_size for file in Path(path).iterdir()}
        found: list[str] = []
        for index, place in metadata.storage_data.items():
            file, end = place.relative_path, place.offset + place.length
            if index.fqn in variables and sizes.get(file, 0) < end:
                found.append(
                    f"{variables[index.fqn]!r}, since '{file}' has {sizes.get(file, 0)} bytes of "
                    f"at least {end}"
                )
        return found

    def save(self, path: str, tree: Mapping[str, Any], replicas: ReplicaSet | None) -> None:
        """Writes variables.

        Each process writes its own shards. Each unsharded variable is written by one process.
        """
        shards.draw_all()
        tensors: Any = keras.tree.map_structure(_tensor_of, tree)
        options: dict[str, Any] = {"planner": _SavePlanner(), **_group_of(replicas)}
        if not whole_files.is_remote(path):
            options["storage_writer"] = _Writer(path)
        with _at_work(path):
            dcp.save(tensors, checkpoint_id=path, **options)

    def load(
        self, path: str, wanted: Sequence[tuple[Key, keras.Variable]], replicas: ReplicaSet | None
    ) -> None:
        """Reads the wanted variables' values from a checkpoint into the variables."""
        names, _ = _read(path)
        targets: dict[str, Any] = {}
        for key, variable in wanted:
            shard = shards.shard_of(variable)
            if shard is not None:
                shard.initializer = None  # the checkpoint gives the values, so none are drawn
            own = _tensor_of(variable)
            targets[names[key]] = torch.empty_like(own) if is_on_read(variable) else own
        with torch.no_grad(), _at_work(path):
            dcp.load(targets, checkpoint_id=path, **_group_of(replicas))
        for key, variable in wanted:
            if is_on_read(variable):
                variable.assign(targets[names[key]])


def _read(path: str) -> tuple[dict[Key, str], Any]:
    """Returns the names of a checkpoint's entries, by key, and the checkpoint's metadata."""
    found = dcp.FileSystemReader(path).read_metadata()
    places: Mapping[str, Sequence[object]] = found.planner_data or {}
    names = found.state_dict_metadata
    return {tuple(map(str, places.get(name, (name,)))): name for name in names}, found


def _group_of(replicas: Any) -> dict[str, Any]:
    if replicas is None or replicas.job is None:
        return {"no_dist": True}
    return {"process_group": replicas.workers.of_torch}


@contextmanager
def _at_work(path: str) -> Generator[None]:
    """Returns a context that raises an OSError in place of torch's CheckpointException.

    A CheckpointException is only a BaseException, so ``except Exception`` does not catch it. The
    context also hides torch's warning that only one process takes part.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except dcp.CheckpointException as error:
        [rank, (cause, _)] = next(iter(error.failures.items()))
        raise OSError(
            f"Expected torch.distributed.checkpoint to do its work. Received: path={path!r}, with "
            f"{type(cause).__name__} on worker {rank}: {cause}. Make sure that the disk has "
            "room, and that all workers may read and write at this path."
        ) from error


def _tensor_of(variable: keras.Variable) -> Any:
    shard = shards.shard_of(variable)
    if shard is not None:
        return _HeldShard.of(keras_compat.stored_value(variable).detach(), shard)
    value = variable.value if is_on_read(variable) else keras_compat.stored_value(variable)
    return value.detach()


@final
class _SavePlanner(dcp.DefaultSavePlanner):
    """Records which variable is being written, for the error messages of `_Writer`.

    Attributes:
        path: The path of the variable whose value torch has most recently asked for.
    """

    path = ""

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Returns the value to write, and records the path of its variable."""
        self.path = "/".join(map(str, self.mappings[index.fqn][1:]))
        return super().lookup_object(index)


@final
class _Writer(dcp.FileSystemWriter):
    """Writes this worker's file. Errors name the file, and torch reports them to all workers."""

    def write_data(self, plan: dcp.SavePlan, planner: Any) -> Any:
        """Writes the values."""
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            file = Path(self.path, f"{plan.storage_data.prefix}0.distcp")
            raise OSError(
                f"{_first_of(error)}, at the variable {planner.path!r} in '{file}'"
            ) from error

    def finish(self, metadata: Any, results: Any) -> None:
        """Writes the metadata, which say where in the files each value is."""
        try:
            super().finish(metadata, results)
        except OSError as error:
            raise OSError(f"{error}, in '{Path(self.path, DcpFormat.marker)}'") from error


def _first_of(error: BaseException) -> BaseException:
    """Returns the original error of a chain, to which torch's archive writer has added others."""
    while error.__context__ is not None:
        error = error.__context__
    return error


@final
class _HeldShard(torch.Tensor):
    """A worker's shard of a variable, which torch's checkpoints see as rectangular blocks."""

    shard: shards.Shard

    @classmethod
    def of(cls, own: torch.Tensor, shard: shards.Shard) -> _HeldShard:
        """Returns `own`, a worker's shard, as a `_HeldShard` that shares the memory of `own`."""
        found = own.as_subclass(cls)
        found.shard = shard
        return found

    def size(self) -> torch.Size:
        """Returns the full variable's shape, which torch compares with the shape in the file."""
        return torch.Size(self.shard.shape)

    def __create_chunk_list__(self) -> list[dcp.ChunkStorageMetadata]:
        """Returns the rectangular blocks of the variable that this worker has."""
        return [
            dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in self.shard.blocks()
        ]

    def __create_write_items__(self, name: str, _: object) -> list[planner.WriteItem]:
        """Returns one `WriteItem` for each block that this worker has."""
        properties = TensorProperties.create_from_tensor(self)
        return [
            planner.WriteItem(
                MetadataIndex(name, chunk.offsets),
                planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Returns the values of the block at `index`, as a view of this shard."""
        chunks = self.__create_chunk_list__()
        at = [chunk.offsets for chunk in chunks].index(torch.Size(index.offset or ()))
        begin = sum(chunk.sizes.numel() for chunk in chunks[:at])
        sizes = chunks[at].sizes
        return self.as_subclass(torch.Tensor).view(-1)[begin : begin + sizes.numel()].view(sizes)
