"""Small arrays of a batch, which go to the devices together.

To put an array on the devices of a mesh takes JAX some tens of microseconds, whatever its size:
it does that in Python, one array after another and, if the array is to be divided, one device after
another (jax 0.10, ``pxla.shard_args``). A short step has little else to do. So the small arrays of
a batch on the host are laid one behind the other, those of one type in one array, which goes to
each device as it is; a program cuts them out again, and each replica takes its own components.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, final
from weakref import WeakValueDictionary

import jax
import numpy as np

# Larger arrays go alone, and each device gets its own rows: there the bytes count.
_SMALL_BYTES = 16 * 1024

# JAX shares memory with NumPy that begins at a multiple of so many bytes.
_SHARED_FROM = 64

# Batches of so many forms are remembered.
_FORMS = 64


@final
@dataclass(frozen=True, eq=False)
class Slot:
    """Where the components of one value lie in a parcel. There is one object for all alike.

    Attributes:
        shape: The shape of the components together, the replicas along axis 0.
        dtype: Their type.
        begin: Where they begin in a parcel of small arrays; None: they are the whole parcel.
        total: The size of the parcel.
        whole: How a parcel of small arrays lies on the devices.
    """

    shape: tuple[int, ...]
    dtype: Any
    begin: int | None
    total: int
    whole: Any

    def cut(self, parcel: Any) -> Any:
        """Returns the components.

        Args:
            parcel: The parcel, NumPy's or JAX's.
        """
        if self.begin is None:
            return parcel
        return parcel[self.begin : self.begin + math.prod(self.shape)].reshape(self.shape)

    def cut_in_program(self, parcel: Any) -> Any:
        """Returns the components, in the code of a program.

        Args:
            parcel: What stands for the parcel there.
        """
        alone = self.begin is None
        return self.cut(parcel if alone else jax.lax.with_sharding_constraint(parcel, self.whole))


# Programs are compiled for slots, and it takes less to compare objects than what they say.
_slots: WeakValueDictionary[Hashable, Slot] = WeakValueDictionary()


def _slot(*form: Any) -> Slot:
    return _slots.setdefault(form, Slot(*form))


@final
@dataclass(frozen=True, eq=False)
class Parcel:
    """Some arrays of a batch: small ones of one type, or a large one.

    Attributes:
        members: Which, by their number among its leaves.
        slots: Where each lies.
        is_small: Whether they are small.
        given: Their type.
        dtype: The type that JAX gives them.
    """

    members: list[int]
    slots: list[Slot]
    is_small: bool
    given: np.dtype[Any]
    dtype: np.dtype[Any]

    def packed(self, leaves: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the arrays in one, as a program takes it.

        They are copied, except for a large one, of which JAX makes a copy when a program takes it.

        Args:
            leaves: The leaves of the batch.
        """
        if self.is_small:
            array = np.frombuffer(_joined([leaves[one] for one in self.members]), self.given)
        else:
            array = leaves[self.members[0]].reshape(self.slots[0].shape)
            if _is_shared(array) or not array.flags.c_contiguous:
                array = array.copy()
        return array if self.given is self.dtype else array.astype(self.dtype)


def _joined(arrays: Sequence[Any]) -> bytes:
    try:
        return b"".join(arrays)  # a third of what NumPy takes for it
    except TypeError:  # not in one piece, or of a type that others do not know
        return b"".join([array.tobytes() for array in arrays])


def _is_shared(rows: np.ndarray) -> bool:
    """Whether a program on the CPU would read a row where it is, long after it was called."""
    address, size = rows.__array_interface__["data"][0], rows.nbytes
    starts = range(address, address + size, size // len(rows))
    return 0 in [start % _SHARED_FROM for start in starts]


@final
class Packing:
    """How batches of each form are packed."""

    def __init__(self, replicas: int, whole: Any) -> None:
        """Starts with no form.

        Args:
            replicas: How many pieces a batch is divided in.
            whole: How an array lies that is on every device.
        """
        self._replicas = replicas
        self._whole = whole
        self._known: dict[Any, list[Parcel] | None] = {}
        self._last: tuple[Any, list[Parcel] | None] = None, None

    def of(self, leaves: Sequence[Any]) -> list[Parcel] | None:
        """Returns the parcels of a batch; None if it cannot be divided evenly as it is.

        Args:
            leaves: The leaves of the batch.
        """
        form = [(leaf.shape, leaf.dtype) for leaf in leaves if type(leaf) is np.ndarray]
        if form == self._last[0] and len(form) == len(leaves):
            return self._last[1]  # it need not be looked up
        return self._looked_up(tuple(form), leaves) if len(form) == len(leaves) else None

    def _looked_up(self, form: Any, leaves: Sequence[Any]) -> list[Parcel] | None:
        if form not in self._known:
            if len(self._known) >= _FORMS:
                self._known.clear()
            self._known[form] = self._parcels(leaves) if self._is_even(leaves) else None
        self._last = list(form), self._known[form]
        return self._last[1]

    def _is_even(self, leaves: Sequence[np.ndarray]) -> bool:
        rows = {leaf.shape[0] if leaf.ndim and leaf.size else 0 for leaf in leaves}
        if len(rows) != 1:
            return False
        count = rows.pop()
        return count > 0 and count % self._replicas == 0

    def _parcels(self, leaves: Sequence[np.ndarray]) -> list[Parcel]:
        by_type: dict[Any, list[int]] = {}
        for index, leaf in enumerate(leaves):
            alone = index if leaf.nbytes > _SMALL_BYTES else None
            by_type.setdefault((leaf.dtype, alone), []).append(index)
        return [
            self._parcel(members, leaves, is_small=alone is None)
            for (_, alone), members in by_type.items()
        ]

    def _parcel(
        self, members: list[int], leaves: Sequence[np.ndarray], *, is_small: bool
    ) -> Parcel:
        arrays = [leaves[member] for member in members]
        given = arrays[0].dtype
        dtype = jax.dtypes.canonicalize_dtype(given)
        total = sum(array.size for array in arrays)
        slots: list[Slot] = []
        begin = 0
        for array in arrays:
            shape = self._replicas, array.shape[0] // self._replicas, *array.shape[1:]
            slots.append(_slot(shape, dtype, begin if is_small else None, total, self._whole))
            begin += array.size
        return Parcel(members, slots, is_small, given, given if given == dtype else dtype)
