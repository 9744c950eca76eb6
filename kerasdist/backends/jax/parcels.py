"""Small arrays of a batch, which go to the devices together.

To put an array on the devices of a mesh takes JAX some tens of microseconds, whatever its size:
it does that in Python, one array after another (jax 0.10, ``pxla.shard_args``). A short step has
little else to do. So the small arrays of a batch on the host are laid side by side, those of one
type in one array, and a program cuts them out again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np

# Larger arrays go alone: to cut them out costs as much as to put them there.
_SMALL_BYTES = 16 * 1024

# JAX shares memory with NumPy that begins at a multiple of so many bytes.
_SHARED_FROM = 64

# Batches of so many forms are remembered.
_FORMS = 64


@final
@dataclass(frozen=True, eq=False)
class Slot:
    """Where the components of one value lie in a parcel.

    Attributes:
        begin: Where they begin, along axis 1.
        end: Where they end.
        shape: Their shape together, the replicas along axis 0.
        form: All that a program must know of them and of the parcel.
    """

    begin: int
    end: int
    shape: tuple[int, ...]
    form: Hashable

    def cut(self, parcel: Any) -> Any:
        """Returns the components.

        Args:
            parcel: The parcel, NumPy's or JAX's.
        """
        return parcel[:, self.begin : self.end].reshape(self.shape)


@final
@dataclass(frozen=True, eq=False)
class Parcel:
    """Some arrays of a batch.

    Attributes:
        members: Which, by their number among its leaves.
        slots: Where each lies.
        dtype: The type that JAX gives them.
    """

    members: list[int]
    slots: list[Slot]
    dtype: np.dtype[Any]

    def packed(self, leaves: Sequence[np.ndarray], replicas: int) -> np.ndarray:
        """Returns the arrays, with a row of axis 0 for each replica.

        They are copied, except for a large one, of which JAX makes a copy when a program takes it.

        Args:
            leaves: The leaves of the batch.
            replicas: How many replicas.
        """
        if len(self.members) > 1:
            array = np.concatenate([leaves[one].reshape(replicas, -1) for one in self.members], 1)
        else:
            array = leaves[self.members[0]].reshape(replicas, -1)
            if array.nbytes <= _SMALL_BYTES or _is_shared(array):
                array = array.copy()
        return array if array.dtype is self.dtype else array.astype(self.dtype)


def _is_shared(rows: np.ndarray) -> bool:
    """Whether a program on the CPU would read a row where it is, long after it was called."""
    address, size = rows.__array_interface__["data"][0], rows.nbytes
    starts = range(address, address + size, size // len(rows))
    return 0 in [start % _SHARED_FROM for start in starts]


@final
class Packing:
    """How batches of each form are packed."""

    def __init__(self, replicas: int) -> None:
        """Starts with no form.

        Args:
            replicas: How many pieces a batch is divided in.
        """
        self._replicas = replicas
        self._known: dict[Any, list[Parcel] | None] = {}
        self._last: tuple[Any, list[Parcel] | None] = None, None

    def of(self, leaves: Sequence[Any]) -> list[Parcel] | None:
        """Returns the parcels of a batch; None if it cannot be divided evenly as it is.

        Args:
            leaves: The leaves of the batch.
        """
        form = tuple([(leaf.shape, leaf.dtype) for leaf in leaves if type(leaf) is np.ndarray])
        if len(form) < len(leaves):
            return None  # not all are on the host
        if form != self._last[0]:  # or it need not be looked up
            if form not in self._known:
                if len(self._known) >= _FORMS:
                    self._known.clear()
                self._known[form] = self._parcels(leaves) if self._is_even(leaves) else None
            self._last = form, self._known[form]
        return self._last[1]

    def _is_even(self, leaves: Sequence[np.ndarray]) -> bool:
        rows = {leaf.shape[0] if leaf.ndim else 0 for leaf in leaves}
        if len(rows) != 1:
            return False
        count = rows.pop()
        return count > 0 and count % self._replicas == 0

    def _parcels(self, leaves: Sequence[np.ndarray]) -> list[Parcel]:
        by_type: dict[Any, list[int]] = {}
        for index, leaf in enumerate(leaves):
            alone = index if leaf.nbytes > _SMALL_BYTES else None
            by_type.setdefault((leaf.dtype, alone), []).append(index)
        return [self._parcel(members, leaves) for members in by_type.values()]

    def _parcel(self, members: list[int], leaves: Sequence[np.ndarray]) -> Parcel:
        arrays = [leaves[member] for member in members]
        dtype = jax.dtypes.canonicalize_dtype(arrays[0].dtype)
        width = sum(array.size for array in arrays) // self._replicas
        slots: list[Slot] = []
        begin = 0
        for array in arrays:
            end = begin + array.size // self._replicas
            shape = self._replicas, array.shape[0] // self._replicas, *array.shape[1:]
            slots.append(Slot(begin, end, shape, (begin, end, shape, dtype, width)))
            begin = end
        return Parcel(members, slots, dtype)
