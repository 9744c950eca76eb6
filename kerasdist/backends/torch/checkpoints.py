"""Checkpoints of torch.distributed.checkpoint: each process writes and reads its shards."""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import keras
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

from kerasdist import keras_compat
from kerasdist.backends.base.checkpoint_format import CheckpointFormat, Key
from kerasdist.backends.base.interface import ReplicaSet
from kerasdist.backends.base.variable_rules import is_on_read
from kerasdist.backends.torch.state import shards

# Offsets and sizes of a box along each axis of a variable, and where it begins in flattened values.
_Box = tuple[tuple[int, ...], tuple[int, ...], int]


@final
class DcpFormat(CheckpointFormat):
    """The checkpoints of torch.distributed.checkpoint, in its own files."""

    marker = ".metadata"

    def shapes(self, path: str) -> Mapping[Key, tuple[int, ...]]:
        """Returns the shapes of a checkpoint's tensors."""
        names, entries = _read(path)
        return {
            key: tuple(entries[name].size)
            for key, name in names.items()
            if isinstance(entries[name], dcp.TensorStorageMetadata)
        }

    def save(self, path: str, tree: Mapping[str, Any], replicas: ReplicaSet | None) -> None:
        """Writes variables; each process writes its shards, and a part of what all hold."""
        shards.draw_all()
        tensors = keras.tree.map_structure(_tensor_of, tree)
        with _quietly():
            dcp.save(tensors, checkpoint_id=path, **_group_of(replicas))

    def load(
        self,
        path: str,
        wanted: Sequence[tuple[Key, keras.Variable]],
        replicas: ReplicaSet | None,
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
        # These are the names in the file.
        plan = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with torch.no_grad(), _quietly():
            dcp.load(targets, checkpoint_id=path, planner=plan, **_group_of(replicas))
        for key, variable in wanted:
            if is_on_read(variable):
                variable.assign(targets[names[key]])


def _read(path: str) -> tuple[dict[Key, str], Mapping[str, Any]]:
    """Returns the names of a checkpoint's entries by their places in its tree, and the entries."""
    found = dcp.FileSystemReader(path).read_metadata()
    places: Mapping[str, Sequence[object]] = found.planner_data or {}
    entries = found.state_dict_metadata
    return {tuple(map(str, places.get(name, (name,)))): name for name in entries}, entries


def _group_of(replicas: Any) -> dict[str, Any]:
    if replicas is None or replicas.job is None:
        return {"no_dist": True}
    return {"process_group": replicas.group.of_torch}


@contextmanager
def _quietly() -> Generator[None]:
    """Hides torch's warning that there is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _tensor_of(variable: keras.Variable) -> Any:
    shard = shards.shard_of(variable)
    if shard is not None:
        return _FlatShard(keras_compat.stored_value(variable).detach(), shard)
    value = variable.value if is_on_read(variable) else keras_compat.stored_value(variable)
    return value.detach()


@final
class _FlatShard:
    """A range of a variable's flattened values, as the boxes of which it consists.

    The three methods with underscores are those by which torch.distributed.checkpoint asks what is
    not a tensor, such as its DTensor.
    """

    def __init__(self, own: torch.Tensor, shard: shards.Shard) -> None:
        self._own = own
        self._shape = torch.Size(shard.shape)
        self._boxes = [
            (torch.Size(offsets), torch.Size(sizes), begin - shard.begin)
            for offsets, sizes, begin in _boxes(shard.shape, shard.begin, shard.end)
        ]

    def size(self) -> torch.Size:
        """Returns the variable's shape."""
        return self._shape

    def __create_write_items__(self, name: str, _: object) -> list[planner.WriteItem]:
        properties = TensorProperties.create_from_tensor(self._own)
        return [
            planner.WriteItem(
                MetadataIndex(name, chunk.offsets),
                planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(chunk, properties, self._shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[dcp.ChunkStorageMetadata]:
        return [dcp.ChunkStorageMetadata(offsets, sizes) for offsets, sizes, _ in self._boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for offsets, sizes, begin in self._boxes:
            if offsets == index.offset:
                return self._own[begin : begin + sizes.numel()].view(sizes)
        raise AssertionError(index)


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
