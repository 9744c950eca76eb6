"""Where the arrays of a step live if one device holds the variables, and others compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import jax
from jax.sharding import SingleDeviceSharding

from kerasdist.backends.jax.mesh.arrays import is_placed
from kerasdist.backends.jax.mesh.layout import Layout
from kerasdist.backends.jax.mesh.placement import MeshPlacement


@final
class CentralPlacement(MeshPlacement):
    """Keeps variables on one device; every program copies them to the mesh, and back."""

    rests_after_each_step = True

    def __init__(self, layout: Layout, device: Any) -> None:
        super().__init__(layout, device)
        self._there = SingleDeviceSharding(device)

    def to_rest(self, arrays: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Moves arrays to the device, except those that are already there."""
        del variables
        return self.from_program(arrays)

    def to_program(self, arrays: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Copies variables' values to every device of the mesh."""
        return jax.device_put(arrays, self.layout.of_variables(variables))

    def from_program(self, arrays: list[Any]) -> list[Any]:
        """Moves arrays to the device; returns the same list if all are there."""
        there = [one.committed and is_placed(one, self._there) for one in arrays]
        if all(there):
            return arrays
        return [
            one if placed else jax.device_put(one.addressable_data(0), self._there)
            for one, placed in zip(arrays, there, strict=True)
        ]
