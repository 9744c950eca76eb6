"""Where the arrays of a step live: on one device, or on a mesh of them."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from kerasdist.backends.jax.flow import ALL_CPUS, BoundedFlow, FreeFlow

AXIS = "replica"

# Outputs and state of a step: whatever pytrees the user's step makes of them.
Step = Callable[[Any, Any], tuple[Any, Any]]


class Placement(abc.ABC):
    """Puts the arrays of a step where they belong, and compiles the step for there.

    Attributes:
        flow: What keeps the host from running too far ahead of the devices.
    """

    flow: FreeFlow | BoundedFlow

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        """Makes the placement.

        Args:
            devices: The replicas' devices.
        """
        self._first = devices[0]

    def variables(self) -> AbstractContextManager[Any]:
        """Returns a context in which new variables are made on the first replica's device."""
        default = jax.config.jax_default_device or jax.local_devices()[0]
        # The context is part of the key of every compiled function, so it is not entered needlessly.
        return contextlib.nullcontext() if default == self._first else jax.default_device(self._first)

    @abc.abstractmethod
    def state(self, state: Any) -> Any:
        """Returns a model's state where a compiled step takes it, moving only what is elsewhere.

        Args:
            state: A pytree of arrays.
        """

    @abc.abstractmethod
    def batch(self, batch: Any) -> Any:
        """Returns a batch so that a compiled step takes it.

        Args:
            batch: A pytree of arrays, JAX's or NumPy's.
        """

    @abc.abstractmethod
    def divided(self, batch: Any) -> Any:
        """Says, inside a compiled step, that the replicas divide the examples among them.

        Args:
            batch: A pytree of traced arrays.
        """

    @abc.abstractmethod
    def compile(self, step: Step) -> Step:
        """Compiles a step, which consumes the state it is given.

        Args:
            step: Takes state and batch, returns outputs and state.
        """

    @property
    @abc.abstractmethod
    def places_ahead(self) -> bool:
        """Whether to move a batch while the step before it still runs."""


@final
class OneDevicePlacement(Placement):
    """Everything on one device: plain Keras, which leaves the choice to ``jax.default_device``."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        """Makes the placement.

        Args:
            devices: The one device.
        """
        super().__init__(devices)
        self._sharding = SingleDeviceSharding(devices[0])
        self.flow = FreeFlow()

    def state(self, state: Any) -> Any:
        """Moves what is bound to another device, say by a strategy that shares the layer."""
        return jax.tree.map(self._here, state)

    def batch(self, batch: Any) -> Any:
        """Moves what the user bound to another device."""
        leaves = jax.tree.leaves(batch)
        if not any(isinstance(leaf, jax.Array) and leaf.committed for leaf in leaves):
            return batch
        return jax.tree.map(self._here, batch)

    def divided(self, batch: Any) -> Any:
        """Does nothing."""
        return batch

    def compile(self, step: Step) -> Step:
        """Compiles as Keras does."""
        return jax.jit(step, donate_argnums=0)

    @property
    def places_ahead(self) -> bool:
        """No: Keras does."""
        return False

    def _here(self, leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and leaf.committed and leaf.sharding != self._sharding:
            return jax.device_put(leaf, self._sharding)
        return leaf


@final
class MeshPlacement(Placement):
    """State on every device, batches divided along their first axis."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        """Makes the placement.

        Args:
            devices: The replicas' devices, of one kind.
        """
        super().__init__(devices)
        self._mesh = Mesh(np.array(devices), (AXIS,))
        self._replicated = NamedSharding(self._mesh, PartitionSpec())
        self._divided = NamedSharding(self._mesh, PartitionSpec(AXIS))
        self._on_host = devices[0].platform == "cpu"
        self.flow = ALL_CPUS if self._on_host else FreeFlow()

    def state(self, state: Any) -> Any:
        """Copies to every device what is not there yet, in one transfer."""
        leaves, structure = jax.tree.flatten(state)
        absent = [
            index
            for index, leaf in enumerate(leaves)
            if not isinstance(leaf, jax.Array) or leaf.sharding != self._replicated
        ]
        placed = jax.device_put([leaves[index] for index in absent], self._replicated)
        for index, leaf in zip(absent, placed, strict=True):
            leaves[index] = leaf
        return jax.tree.unflatten(structure, leaves)

    def batch(self, batch: Any) -> Any:
        """Sends each accelerator its rows; the CPU's step itself takes its rows from NumPy arrays."""
        return jax.tree.map(self._placed_on_host if self._on_host else self._placed, batch)

    def divided(self, batch: Any) -> Any:
        """Constrains the first axis to the mesh; XLA pads an uneven one by itself, exactly."""

        def constrained(leaf: Any) -> Any:
            # Of fewer examples than replicas nothing is worth dividing.
            if leaf.ndim == 0 or leaf.shape[0] < self._mesh.size:
                return leaf
            return jax.lax.with_sharding_constraint(leaf, self._divided)

        return jax.tree.map(constrained, batch)

    def compile(self, step: Step) -> Step:
        """Compiles for the mesh, with the state on every device before and after."""

        def program(state: Any, batch: Any) -> tuple[Any, Any]:
            outputs, state = step(state, batch)
            return jax.tree.map(self._returned, outputs), state

        # Left to itself, XLA divides an uneven array of the host in ways that JAX has no name for.
        batch = self._replicated if self._on_host else None
        return jax.jit(
            program,
            donate_argnums=0,
            in_shardings=(self._replicated, batch),
            out_shardings=(None, self._replicated),
        )

    @property
    def places_ahead(self) -> bool:
        """On accelerators."""
        return not self._on_host

    def _placed(self, leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and leaf.sharding in (self._divided, self._replicated):
            return leaf
        return jax.device_put(leaf, self._even_sharding(leaf))

    def _placed_on_host(self, leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and leaf.committed and leaf.sharding != self._replicated:
            return jax.device_put(leaf, self._replicated)
        return leaf

    def _returned(self, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.ndim == 0:
            return leaf
        return jax.lax.with_sharding_constraint(leaf, self._even_sharding(leaf))

    def _even_sharding(self, leaf: Any) -> Sharding:
        # What crosses the border of a program is divided evenly or not at all.
        even = leaf.ndim > 0 and leaf.shape[0] % self._mesh.size == 0
        return self._divided if even else self._replicated
