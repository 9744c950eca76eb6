"""Checkpoints of torch.distributed.checkpoint: each process writes and reads its shards."""

from __future__ import annotations

import dataclasses
import math
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
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from kerasdist import keras_compat
from kerasdist.backends.base.interface import CheckpointFormat, Key, ReplicaSet
from kerasdist.backends.base.variable_rules import is_on_read
from kerasdist.backends.torch.state import shards
from kerasdist.core import whole_files

# Offsets and sizes of a box along each axis of a variable, and where it begins in flattened values.
_Box = tuple[tuple[int, ...], tuple[int, ...], int]


@final
class DcpFormat(CheckpointFormat):
    """The checkpoints of torch.distributed.checkpoint, in its own files."""

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
        """Returns the arrays of which a file on this machine is too short."""
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
        """Writes variables; each process writes its shards, and a part of what all hold."""
        shards.draw_all()
        tensors: Any = keras.tree.map_structure(_tensor_of, tree)
        writer = None if whole_files.is_remote(path) else _Writer(path)
        with _at_work(path):
            dcp.save(
                tensors,
                checkpoint_id=path,
                storage_writer=writer,
                planner=_SavePlanner(),
                **_group_of(replicas),
            )

    def load(
        self, path: str, wanted: Sequence[tuple[Key, keras.Variable]], replicas: ReplicaSet | None
    ) -> None:
        """Gives variables the values of a checkpoint, in place."""
        names, _ = _read(path)
        targets: dict[str, Any] = {}
        for key, variable in wanted:
            shard = shards.shard_of(variable)
            if shard is not None:
                shard.initializer = None  # what a file fills is not drawn
            own = _tensor_of(variable)
            targets[names[key]] = torch.empty_like(own) if is_on_read(variable) else own
        plan = _LoadPlanner(targets)
        with torch.no_grad(), _at_work(path):
            dcp.load({}, checkpoint_id=path, planner=plan, **_group_of(replicas))
        for key, variable in wanted:
            if is_on_read(variable):
                variable.assign(targets[names[key]])


def _read(path: str) -> tuple[dict[Key, str], Any]:
    """Returns the names of a checkpoint's entries by their places in its tree, and its metadata."""
    found = dcp.FileSystemReader(path).read_metadata()
    places: Mapping[str, Sequence[object]] = found.planner_data or {}
    names = found.state_dict_metadata
    return {tuple(map(str, places.get(name, (name,)))): name for name in names}, found


def _group_of(replicas: Any) -> dict[str, Any]:
    if replicas is None or replicas.job is None:
        return {"no_dist": True}
    return {"process_group": replicas.group.of_torch}


@contextmanager
def _at_work(path: str) -> Generator[None]:
    """Raises an ordinary error in place of torch's, which no `except Exception` catches.

    Torch's warning that there is one process is hidden.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except dcp.CheckpointException as error:
        [rank, (cause, _)] = next(iter(error.failures.items()))
        raise OSError(
            f"Expected torch.distributed.checkpoint to do its work. Received: path={path!r}, with "
            f"{type(cause).__name__} on worker {rank}: {cause}. See that the disk has room, and "
            "that all workers may read and write there."
        ) from error


def _tensor_of(variable: keras.Variable) -> Any:
    shard = shards.shard_of(variable)
    if shard is not None:
        return _FlatShard(keras_compat.stored_value(variable).detach(), shard)
    value = variable.value if is_on_read(variable) else keras_compat.stored_value(variable)
    return value.detach()


@final
class _FlatShard:
    """A range of a variable's flattened values, as the boxes of which it consists."""

    def __init__(self, own: torch.Tensor, shard: shards.Shard) -> None:
        self._own = own
        self.shape = torch.Size(shard.shape)
        self.properties = TensorProperties.create_from_tensor(own)
        self._begins: dict[torch.Size, int] = {}
        self.chunks: list[dcp.ChunkStorageMetadata] = []
        for offsets, sizes, begin in _boxes(shard.shape, shard.begin, shard.end):
            chunk = dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            self._begins[chunk.offsets] = begin - shard.begin
            self.chunks.append(chunk)

    def box(self, index: MetadataIndex) -> torch.Tensor:
        """Returns the values of a box, in the memory of the shard."""
        [sizes] = [chunk.sizes for chunk in self.chunks if chunk.offsets == index.offset]
        assert index.offset is not None
        begin = self._begins[index.offset]
        return self._own[begin : begin + sizes.numel()].view(sizes)


def _apart(tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, _FlatShard]]:
    """Returns the tensors and the shards of a dictionary, each by itself."""
    flat = {name: one for name, one in tree.items() if isinstance(one, _FlatShard)}
    return {name: one for name, one in tree.items() if name not in flat}, flat


@final
class _SavePlanner(dcp.DefaultSavePlanner):
    """Saves shards too.

    Attributes:
        path: The path of the variable of which a value was asked for last.
    """

    path = ""

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Takes what is to be written."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict, self._flat = _apart(self.state_dict)

    def create_local_plan(self) -> dcp.SavePlan:
        """Returns what this worker has to write."""
        plan = super().create_local_plan()
        items = [
            planner.WriteItem(
                MetadataIndex(name, chunk.offsets),
                planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(chunk, shard.properties, shard.shape),
            )
            for name, shard in self._flat.items()
            for chunk in shard.chunks
        ]
        self.plan = dataclasses.replace(plan, items=[*plan.items, *items])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Returns what is to be written."""
        self.path = "/".join(map(str, self.mappings[index.fqn][1:]))
        shard = self._flat.get(index.fqn)
        return super().lookup_object(index) if shard is None else shard.box(index)


@final
class _Writer(dcp.FileSystemWriter):
    """Writes this worker's file; an error says where, and torch hands it to all workers."""

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
        """Writes what says where the values are."""
        try:
            super().finish(metadata, results)
        except OSError as error:
            raise OSError(f"{error}, in '{Path(self.path, DcpFormat.marker)}'") from error


def _first_of(error: BaseException) -> BaseException:
    """Returns the first error of a chain: torch's own writer of archives adds another one."""
    while error.__context__ is not None:
        error = error.__context__
    return error


@final
class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Reads into tensors and shards, by the names in the file; `dcp.load` would drop the shards."""

    def __init__(self, targets: Mapping[str, Any]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors, self._flat = _apart(targets)

    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        """Takes what the file has."""
        super().set_up_planner(self._tensors, metadata, is_coordinator)

    def create_local_plan(self) -> dcp.LoadPlan:
        """Returns what this worker has to read."""
        items = super().create_local_plan().items
        for name, shard in self._flat.items():
            there: Any = self.metadata and self.metadata.state_dict_metadata[name]
            items += create_read_items_for_chunk_list(name, there, shard.chunks)
        return dcp.LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Returns where what is read belongs."""
        shard = self._flat.get(index.fqn)
        return super().lookup_tensor(index) if shard is None else shard.box(index)


def _boxes(shape: Sequence[int], begin: int, end: int) -> list[_Box]:
    """Returns the boxes that a range of flattened values of a shape consists of."""
    if begin == end:
        return []
    if not shape:
        return [((), (), begin)]
    inner = math.prod(shape[1:])
    first, last = -(-begin // inner), end // inner
    found: list[_Box] = []
    if first > last:  # inside of one row
        return _in_row(shape, last, begin, end)
    if begin < first * inner:
        found += _in_row(shape, first - 1, begin, first * inner)
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        found.append(((first, *zeros), (last - first, *shape[1:]), first * inner))
    if last * inner < end:
        found += _in_row(shape, last, last * inner, end)
    return found


def _in_row(shape: Sequence[int], row: int, begin: int, end: int) -> list[_Box]:
    start = row * math.prod(shape[1:])
    return [
        ((row, *offsets), (1, *sizes), start + at)
        for offsets, sizes, at in _boxes(shape[1:], begin - start, end - start)
    ]
