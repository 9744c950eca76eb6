"""How the arguments of a program enter it: which arrays, and what it is compiled for."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, final

import jax
import keras
import numpy as np

from kerasdist.backends.jax.arrays import is_traced
from kerasdist.backends.jax.sources import Source, is_distributed, joined
from kerasdist.errors import ScopeError

# Stands for an argument that is compiled in.
_NO_ARRAY = -1


@final
class Entering:
    """The arguments of one call.

    Attributes:
        arrays: What the program takes.
        forms: For each argument what the program is compiled for.
    """

    def __init__(self, leaves: Sequence[Any]) -> None:
        """Looks at the arguments.

        Args:
            leaves: Arrays, distributed values and other objects.
        """
        self.arrays: list[Any] = []
        self._leaves = leaves
        self._sources: dict[int, Source] = {}
        self._places: list[int] = []
        self._parcels: dict[int, int] = {}
        self.forms: list[Hashable] = [self._form(i, leaf) for i, leaf in enumerate(leaves)]

    def constants(self) -> list[Any]:
        """Returns the arguments that are compiled in."""
        pairs = zip(self._leaves, self._places, strict=True)
        return [leaf for leaf, place in pairs if place == _NO_ARRAY]

    def leaves(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the arguments, inside the program.

        Args:
            arrays: What stands for `arrays` there.
        """
        return [
            leaf if place == _NO_ARRAY else self._leaf(index, arrays[place])
            for index, (leaf, place) in enumerate(zip(self._leaves, self._places, strict=True))
        ]

    def _leaf(self, index: int, array: Any) -> Any:
        source = self._sources.get(index)
        if source is None:
            return array
        if source.packed is not None:
            array = source.packed[1].cut(array)
        return type(self._leaves[index])(type(source)(array, source.layout))

    def _form(self, index: int, leaf: Any) -> Hashable:
        if is_distributed(leaf):
            source = joined(leaf)
            if source is None:  # if a program needs it, that will be said
                self._places.append(_NO_ARRAY)
                return type(leaf), id(leaf)
            self._sources[index] = source
            if source.packed is not None:
                parcel, slot = source.packed
                place = self._parcels.setdefault(id(parcel), len(self.arrays))
                if place == len(self.arrays):
                    self.arrays.append(parcel)
                self._places.append(place)
                return type(leaf), place, slot.form
            array = source.entering
            self._enter(array)
            return type(leaf), type(source), source.layout, array.shape, array.dtype
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
        self._places.append(len(self.arrays))
        self.arrays.append(array)
