"""Variables that are sharded over the workers of a job (`sharding=`).

A shard is a range of a variable's flattened values, so any shape and any number of workers are
possible. (With a LayoutMap it is a rectangular block instead: `layout_shards.py`.) Code outside of
steps reads full values, so a read of a sharded variable is a collective. When a value is assigned,
each worker keeps only its shard of the value.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Container, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, final

import keras
import numpy as np
import torch

from kerasdist import keras_compat
from kerasdist.agreement.results import checksum_in_type, checksum_of
from kerasdist.backends.base import weight_files
from kerasdist.backends.base.checks import meeting_at
from kerasdist.backends.torch.replica.placing import move
from kerasdist.backends.torch.workers.process_group import bytes_of, padded
from kerasdist.core.context import current, replaced, replica_scope
from kerasdist.core.ownership import VariableTable
from kerasdist.core.sharding import GROUP_BYTES, HeldShard, Region
from kerasdist.job.job import current_job

if TYPE_CHECKING:
    from kerasdist.backends.torch.workers.process_group import ProcessGroup, Waitable

_shards: VariableTable[Shard] = VariableTable()
_undrawn: list[tuple[weakref.ref[keras.Variable], Shard, ProcessGroup]] = []
_groups: weakref.WeakSet[WeightGroup] = weakref.WeakSet()
_numbers = itertools.count()  # gives each `WeightGroup` its number

# The number of elements of a NumPy array that torch copies at a time.
_BLOCK = 1 << 20


# A rectangular block of a variable: its offset and its size along each axis.
Block = tuple[tuple[int, ...], tuple[int, ...]]


class Shard:
    """Describes which values of one variable this worker holds; cuts and gathers such shards.

    Attributes:
        shape: The variable's shape.
        size: How many elements the variable has.
        begin: Where this worker's shard begins in the flattened values.
        end: Where the shard ends; the shards of the last workers may be shorter, or empty.
        length: The length of the first worker's shard. In messages, shorter shards are padded to
            this length.
        own_shape: The shape of this worker's shard.
        gradient_shape: The shape of the gradient that this worker has after its replica's backward
            pass.
        described: Two texts: how the variable is sharded, and why.
        group: The workers among which the variable is divided.
        is_first: Whether this worker is the first of those that hold equal shards.
        together: The group of weights with which this shard is gathered; None if the shard is
            gathered alone.
        initializer: The function that will draw the variable's values; None if the variable has
            values already.
    """

    def __init__(self, shape: tuple[int, ...], group: ProcessGroup) -> None:
        """Divides a variable of this shape over the workers of a group."""
        size = math.prod(shape)
        self.shape = self.gradient_shape = shape
        self.size = size
        self.length = -(-size // group.size)
        self.begin = min(size, group.rank * self.length)
        self.end = min(size, self.begin + self.length)
        self.own_shape: tuple[int, ...] = (self.end - self.begin,)
        self.described = f"flattened, by {group.size}", "PyTorch divides any shape"
        self.group = group
        self.is_first = group.is_first
        self.together: WeightGroup | None = None
        self.initializer: Any = None

    def region(self) -> Region | None:
        """Returns which elements this worker holds; None if no `Region` can describe them."""
        return Region(1, self.begin, self.end)

    def blocks(self) -> list[Block]:
        """Returns the rectangular blocks of the variable that this worker holds, in order."""
        return [*_blocks(self.shape, self.begin, self.end)]

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this worker's shard of a whole value, as a view if torch can make one."""
        # The value may be a sparse gradient of an embedding.
        return whole.detach().to_dense().reshape(-1)[self.begin : self.end]

    def copy_cut(self, own: torch.Tensor, whole: np.ndarray[Any, Any], dtype: str) -> None:
        """Copies this worker's shard of a NumPy array into `own`, a block at a time."""
        for begin in range(self.begin, self.end, _BLOCK):
            end = min(begin + _BLOCK, self.end)
            some = keras_compat.ops.convert_to_tensor(whole.flat[begin:end], dtype=dtype)
            own[begin - self.begin : end - self.begin].copy_(some)

    @torch.no_grad()
    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Returns the whole value from the workers' shards. All workers must call this method."""
        draw_all()
        # An offloaded shard is in the host's memory, but its whole value is needed on the device.
        own = move(self.group.device, own.detach())
        gathered = self.group.gather_alike(padded(own, self.length))
        return gathered.view(-1)[: self.size].view(self.shape)


@final
class WeightGroup:
    """Weights of one layer, or of several small layers, that are gathered and freed together.

    Their gradients are summed together, too. All workers make variables in the same order, and so
    the same groups. A message consists of bytes, because a group may have weights of several types,
    as when some are quantized. A variable may be deleted earlier on one worker than on another. So
    messages have room for a weight until its variable is deleted on all workers.

    Attributes:
        is_open: Whether further weights may join the group; True until the group's first gather.
        is_used_itself: Whether code outside of layers has read a weight of the group in this step.
    """

    def __init__(self, variable: keras.Variable, shard: Shard) -> None:
        """Starts with one weight."""
        self._members: list[tuple[weakref.ref[keras.Variable], Shard, torch.dtype]] = []
        self.is_open = True
        self.is_used_itself = False
        self._number = next(_numbers)
        self._group = shard.group
        self._empty = keras_compat.stored_value(variable).detach()[:0]
        self._bytes = 0
        _groups.add(self)
        self.add(variable, shard)

    def add(self, variable: keras.Variable, shard: Shard) -> None:
        """Adds a weight to the group."""
        dtype = keras_compat.stored_value(variable).dtype
        self._members.append((weakref.ref(variable), shard, dtype))
        self._layer = variable.path.rpartition("/")[0]
        self._bytes += shard.size * dtype.itemsize
        shard.together = self

    def accepts(self, variable: keras.Variable) -> bool:
        """Returns whether a weight may join: it is of the same layer, or the group stays small."""
        limit = self._group.bytes_per_pack or GROUP_BYTES
        stored = keras_compat.stored_value(variable)
        if not self.is_open or stored.device != self._empty.device:
            return False
        size = math.prod(variable.shape) * stored.element_size()
        return variable.path.rpartition("/")[0] == self._layer or self._bytes + size <= limit

    @torch.no_grad()
    def start_gather(self) -> tuple[Waitable, torch.Tensor]:
        """Starts an all-gather of the weights. All workers must call this method."""
        draw_all()
        self.is_open = False
        parts = []
        for reference, shard, dtype in self._members:
            variable = reference()
            part = self._empty if variable is None else keras_compat.stored_value(variable)
            parts.append(padded(bytes_of(part, part.device), shard.length * dtype.itemsize))
        return self._group.start_gather_of_parts(torch.cat(parts) if len(parts) > 1 else parts[0])

    def full_values(
        self, gathered: torch.Tensor
    ) -> Generator[tuple[keras.Variable, Shard, torch.Tensor]]:
        """Yields each weight that still exists, its `Shard`, and its full value from `gathered`."""
        lengths = [shard.length * dtype.itemsize for _, shard, dtype in self._members]
        columns = gathered.view(self._group.size, -1).split(lengths, 1)
        for (reference, shard, dtype), column in zip(self._members, columns, strict=True):
            variable = reference()
            if variable is not None:
                flat = column.contiguous().view(-1).view(dtype)[: shard.size]
                yield variable, shard, flat.view(shard.shape)

    @property
    def is_empty(self) -> bool:
        """Whether all weights of this group are deleted on all workers, as by quantization."""
        return not self._members

    def freed(self) -> list[list[int]]:
        """Returns `[group number, weight's index]` for each weight deleted on this worker."""
        members = enumerate(self._members)
        return [[self._number, place] for place, (one, _, _) in members if one() is None]

    def drop(self, freed: Container[tuple[int, int]]) -> None:
        """Removes from the group the weights in `freed`, which are deleted on all workers."""
        members = enumerate(self._members)
        self._members = [one for place, one in members if (self._number, place) not in freed]


def shard_of(variable: keras.Variable) -> Shard | None:
    """Returns a variable's shard; None if it is not sharded, and for all variables in a `Trial`."""
    return _shards.get(variable) if current.trial is None else None


def read(variable: keras.Variable) -> torch.Tensor:
    """Returns a variable's whole value. If it is sharded, all workers must call this function."""
    stored, shard = keras_compat.stored_value(variable), _shards.get(variable)
    if shard is None:
        return stored
    with meeting_at(variable, "read", current_job()):
        return shard.gather(stored).requires_grad_(stored.requires_grad)


@torch.no_grad()
def keep_shard(variable: keras.Variable, shard: Shard) -> None:
    """Keeps only this worker's shard of a variable."""
    stored = keras_compat.stored_value(variable)
    own = torch.nn.Parameter(shard.cut(stored).clone(), requires_grad=stored.requires_grad)
    keras_compat.store_value(variable, own)
    _shards.put(variable, shard)


def shard_without_values(
    variable: keras.Variable, initializer: object, shard: Shard, workers: ProcessGroup
) -> None:
    """Makes a shard whose values come later, such as from a weight file or from `draw_all`."""
    own = keras_compat.ops.zeros(shard.own_shape, keras_compat.stored_dtype(variable))
    keras_compat.store_value(variable, torch.nn.Parameter(own, requires_grad=variable.trainable))
    _shards.put(variable, shard)
    shard.initializer = initializer
    _undrawn.append((weakref.ref(variable), shard, workers))


@torch.no_grad()
def draw_all() -> None:
    """Draws values, on the chief, for variables that have none yet.

    All workers must call this function. All shards are allocated before the first full value is
    made, so that full values leave no gaps in memory when they are freed.
    """
    if not _undrawn:
        return
    waiting = [one for one in _undrawn if one[1].initializer is not None]
    _undrawn.clear()
    job = current_job()
    if job is None:
        return
    variables = [reference() for reference, _, _ in waiting]
    there = [number for number, one in enumerate(variables) if one is not None]
    freed = [one for group in _groups for one in group.freed()]
    # A variable that is deleted on one worker may still exist on another, in a reference cycle.
    on_all = job.all_gather_object("variables that have no values yet", [there, freed])
    gone = set.intersection(*({(group, place) for group, place in one} for _, one in on_all))
    for group in _groups if gone else ():
        group.drop(gone)
    for number in sorted(set(there).intersection(*(one for one, _ in on_all))):
        variable, (_, shard, workers) = variables[number], waiting[number]
        assert variable is not None
        draw_one(variable, shard, workers)


def draw_one(variable: keras.Variable, shard: Shard, workers: ProcessGroup) -> None:
    """Draws a variable's values on the chief, and gives each worker its shard of them.

    All workers must call this function.
    """
    own, initializer = keras_compat.held_value(variable).detach(), shard.initializer
    shard.initializer = None
    with (
        keras_compat.in_trial(None),
        replica_scope(None),
        keras.device(own.device.type),
        torch.cuda.device(own.device) if own.is_cuda else nullcontext(),
    ):
        if workers.rank == 0:
            dtype = keras_compat.stored_dtype(variable)
            whole = keras_compat.ops.convert_to_tensor(initializer(shard.shape, dtype=dtype), dtype)
        else:
            whole = own.new_empty(shard.shape)
        own.copy_(shard.cut(workers.broadcast(whole)))


def _blocks(shape: Sequence[int], begin: int, end: int) -> Generator[Block]:
    """Yields the rectangular blocks that make up a range of an array's flattened values."""
    if not shape and begin < end:
        yield (), ()
        return
    while begin < end:
        along, inner = 0, math.prod(shape[1:])
        # Find the outermost axis along which a slice of size 1 begins at `begin`, and ends no
        # later than the range.
        while begin % inner or begin + inner > end:
            along += 1
            inner //= shape[along]
        offsets = tuple(map(int, np.unravel_index(begin, shape)))
        count = min(shape[along] - offsets[along], (end - begin) // inner)
        yield offsets, (*[1] * along, count, *shape[along + 1 :])
        begin += count * inner


def held_shards(variable: keras.Variable) -> list[HeldShard]:
    """Returns this worker's shard of a variable, for a backup.

    Returns [] if the variable is not sharded, or if no `Region` can describe the shard.
    """
    shard = _shards.get(variable)
    region = None if shard is None else shard.region()
    if shard is None or region is None:
        return []
    draw_all()
    own = keras_compat.stored_value(variable)

    def write(values: np.ndarray[Any, Any]) -> None:
        with torch.no_grad():
            own.copy_(keras_compat.ops.convert_to_tensor(values.reshape(own.shape)))

    def read() -> np.ndarray[Any, Any]:
        return keras_compat.ops.convert_to_numpy(own)

    dtype = keras.backend.standardize_dtype(own.dtype)
    return [HeldShard(region, dtype, read, write, shard.is_first, variable.path)]


@contextmanager
def held_whole(variables: Iterable[keras.Variable]) -> Generator[None]:
    """Lets each worker hold the full values of these variables inside the block.

    After the block each worker keeps its shards of the values. All workers must enter the context.
    """
    held: list[tuple[keras.Variable, Shard, torch.Tensor]] = []
    whole: list[tuple[keras.Variable, torch.Tensor]] = []
    for variable in variables:
        shard, own = _shards.get(variable), keras_compat.stored_value(variable)
        if shard is not None:
            value = torch.nn.Parameter(shard.gather(own), requires_grad=own.requires_grad)
            held.append((variable, shard, own))
            whole.append((variable, value))
    with stored_as(whole):
        try:
            yield
        finally:
            with torch.no_grad():
                for variable, shard, own in held:
                    own.copy_(shard.cut(keras_compat.stored_value(variable)))


@contextmanager
def stored_as(values: Sequence[tuple[keras.Variable, torch.Tensor]]) -> Generator[None]:
    """Stores these tensors, full values or shards, in their variables while the block runs.

    A variable then has the shape of its tensor, and counts as not sharded.
    """
    before = [
        (one, _shards.get(one), keras_compat.stored_value(one), tuple(one.shape))
        for one, _ in values
    ]
    for variable, value in values:
        keras_compat.store_value(variable, value)
        keras_compat.internals.SHAPE.set(variable, tuple(value.shape))
        _shards.discard(variable)
    try:
        yield
    finally:
        for variable, shard, own, shape in before:
            keras_compat.store_value(variable, own)
            keras_compat.internals.SHAPE.set(variable, shape)
            if shard is not None:
                _shards.put(variable, shard)


@final
class _Reading:
    """A switch: while `shards` is True, reads of sharded variables return this worker's shards."""

    shards = False


@cache
def install() -> None:
    """Installs the hooks into Keras's reads and writes of variables, once per process."""
    weight_files.install()
    keras_compat.install(read_whole=_read, store=_store, track=_track)


def _track(original: Callable[..., None], *args: object) -> None:
    """Makes a layer register this worker's shards as its torch parameters."""
    with replaced(_Reading, "shards", True):
        original(*args)


def _read(original: Callable[[Any], Any], variable: keras.Variable) -> Any:
    shard = _shards.get(variable)
    if shard is None or _Reading.shards or keras_compat.is_symbolic():
        return original(variable)
    scope = keras_compat.get_stateless_scope()
    if scope is not None and scope.get_current_value(variable) is not None:
        return original(variable)
    return keras_compat.autocast(variable, read(variable))


@torch.no_grad()
def _store(original: Callable[..., Any], variable: keras.Variable, value: Any) -> Any:
    if weight_files.is_compared(variable, value):
        return value
    shard = _shards.get(variable)
    in_scope = keras_compat.get_stateless_scope() is not None
    if shard is None or in_scope:
        return original(variable, value)
    dtype = variable.dtype
    if not isinstance(value, np.ndarray):
        value = keras_compat.ops.convert_to_tensor(value, dtype=dtype)
    if tuple(value.shape) != tuple(variable.shape):
        return original(variable, value)  # Keras itself refuses a value of another shape

    def checksum() -> int:
        if isinstance(value, np.ndarray):  # usually from a file, so it is not copied as a whole
            return checksum_in_type(value, dtype)
        # torch gives the bytes, because NumPy lacks some types, such as bfloat16.
        return checksum_of(bytes_of(value, "cpu").numpy())

    with meeting_at(variable, "assignment", current_job(), checksum):
        shard.initializer = None
        own = keras_compat.stored_value(variable)
        if isinstance(value, np.ndarray):
            shard.copy_cut(own, value, dtype)
        else:
            own.copy_(shard.cut(value))
    return value
