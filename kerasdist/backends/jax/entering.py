"""How the arguments of a program enter it: which arrays, and what it is compiled for."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any, final

import jax
import keras
import numpy as np

from kerasdist.backends.jax.arrays import is_traced
from kerasdist.backends.jax.parcels import Slot
from kerasdist.backends.jax.sources import KINDS, flatten, is_distributed, joined
from kerasdist.errors import ScopeError

# Where an argument is that is compiled in.
_NO_ARRAY = -1, None

_LEAF = jax.tree.structure(0)


@final
class Entering:
    """The arguments of one call, looked at in one pass, since a short step has little else to do.

    Attributes:
        arrays: What the program takes.
        form: What the program is compiled for.
    """

    def __init__(self, structure: Any) -> None:
        """Looks at the arguments.

        Args:
            structure: A pytree of arrays, distributed values and other objects.
        """
        self.arrays: list[Any] = []
        self._structure = structure
        self._places: list[tuple[int, Slot | None]] = []
        self.form: Hashable = self._form(structure)

    @cached_property
    def _flat(self) -> tuple[list[Any], Any]:
        """The leaves, in the order in which `_form` meets them, and how they go together."""
        return flatten(self._structure)

    def constants(self) -> list[Any]:
        """Returns the arguments that are compiled in."""
        pairs = zip(self._flat[0], self._places, strict=True)
        return [leaf for leaf, place in pairs if place is _NO_ARRAY]

    def inside(self, arrays: Sequence[Any]) -> Any:
        """Returns the arguments, inside the program.

        Args:
            arrays: What stands for `arrays` there.
        """
        leaves, structure = self._flat
        own = [
            leaf if place is _NO_ARRAY else _inside(leaf, arrays[place[0]], place[1])
            for leaf, place in zip(leaves, self._places, strict=True)
        ]
        return jax.tree.unflatten(structure, own)

    def _form(self, one: Any) -> Hashable:
        kind = type(one)
        if kind in KINDS:
            return self._form_of_distributed(one)
        if kind is tuple or kind is list:  # what JAX would flatten alike, in more time
            return kind, *map(self._form, one)
        if kind is dict and not one:  # most calls have no keyword arguments
            return kind
        if kind is np.ndarray:
            return self._form_of_leaf(one)
        leaves, structure = flatten(one)
        if structure != _LEAF:
            return structure, *map(self._form_of_leaf, leaves)
        return self._form_of_leaf(one)

    def _form_of_distributed(self, value: Any) -> Hashable:
        source = joined(value)
        if source is None:  # if a program needs it, that will be said
            self._places.append(_NO_ARRAY)
            return type(value), id(value)
        if source.packed is None:
            array = source.entering
            self._enter(array)
            return type(value), type(source), source.layout, array.shape, array.dtype
        parcel, slot = source.packed
        arrays = self.arrays  # of which few precede: most parcels are met twice in a row
        place = len(arrays) - 1
        while place >= 0 and arrays[place] is not parcel:
            place -= 1
        if place < 0:
            place = len(arrays)
            arrays.append(parcel)
        self._places.append((place, slot))
        return type(value), place, slot

    def _form_of_leaf(self, leaf: Any) -> Hashable:
        if is_distributed(leaf):
            return self._form_of_distributed(leaf)
        if isinstance(leaf, jax.Array):
            if is_traced(leaf):
                raise ScopeError(
                    "Expected arrays. Received: a value that JAX is tracing, in a call of "
                    "strategy.run or of a kerasdist.function. Use kerasdist.function instead of "
                    "jax.jit around it, and kerasdist.value_and_grad instead of jax.grad."
                )
            self._enter(leaf)
            return leaf.shape, leaf.dtype, leaf.weak_type
        if isinstance(leaf, np.ndarray | np.generic):
            self._enter(leaf)
            return leaf.shape, leaf.dtype
        if not isinstance(leaf, keras.Variable) and hasattr(leaf, "__array__"):
            array = np.asarray(leaf)  # of another framework, say a batch of tf.data
            self._enter(array)
            return array.shape, array.dtype
        self._places.append(_NO_ARRAY)
        try:
            hash(leaf)
        except TypeError:
            return type(leaf), id(leaf)
        return type(leaf), leaf

    def _enter(self, array: Any) -> None:
        self._places.append((len(self.arrays), None))
        self.arrays.append(array)


def _inside(leaf: Any, array: Any, slot: Slot | None) -> Any:
    """Returns an argument, inside the program, where an array stands for what it has."""
    if not is_distributed(leaf):
        return array
    source = joined(leaf)
    assert source is not None
    if slot is not None:  # the value itself may have left the parcel since
        array = slot.cut_in_program(array)
    return type(leaf)(type(source)(array, source.layout))
