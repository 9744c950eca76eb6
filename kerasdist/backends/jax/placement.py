"""Where the arrays of a step live: on one device, or on a mesh of them."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import NamedSharding, SingleDeviceSharding

from kerasdist.backends.jax.flow import ALL_CPUS, BoundedFlow, FreeFlow
from kerasdist.backends.jax.layout import Layout

# Takes state and batch, returns outputs and state: whatever pytrees the user's step makes of them.
Step = Callable[[Any, Any], tuple[Any, Any]]


class Placement(abc.ABC):
    """Puts the arrays of a step where they belong, and compiles the step for there.

    Attributes:
        devices: The replicas' devices.
        flow: What keeps the host from running too far ahead of the devices.
        places_ahead: Whether to move a batch while the step before it still runs.
    """

    flow: FreeFlow | BoundedFlow = FreeFlow()
    places_ahead: bool = False

    def __init__(self, devices: Sequence[Any]) -> None:
        """Makes the placement.

        Args:
            devices: The replicas' devices.
        """
        self.devices = tuple(devices)
        self._first = devices[0]

    def variables(self) -> AbstractContextManager[Any]:
        """Returns a context in which new variables are made on the first replica's device."""
        chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
        default = chosen or jax.local_devices()[0]
        # The context is part of the key of every compiled function, so not entered needlessly.
        if default == self._first:
            return contextlib.nullcontext()
        return jax.default_device(self._first)

    @abc.abstractmethod
    def state(self, state: Any, variables: Any) -> Any:
        """Returns a model's state where a compiled step takes it, moving only what is elsewhere.

        Args:
            state: A pytree of arrays.
            variables: The Keras variables whose values they are, as a pytree of the same structure.
        """

    @abc.abstractmethod
    def batch(self, batch: Any, axis: int = 0) -> Any:
        """Returns a batch as a compiled step takes it.

        Args:
            batch: A pytree of arrays, JAX's or NumPy's.
            axis: The axis of the examples.
        """

    @abc.abstractmethod
    def divided(self, batch: Any) -> Any:
        """Says, inside a compiled step, that the replicas divide the examples among them.

        Args:
            batch: A pytree of traced arrays, the examples along the first axis.
        """

    @abc.abstractmethod
    def compile(self, step: Step, axis: int = 0) -> Step:
        """Compiles a step, which consumes the state it is given.

        Args:
            step: A function of state and batch.
            axis: The axis of the examples in the batch.
        """


@final
class OneDevicePlacement(Placement):
    """Everything on one device: plain Keras, which leaves the choice to ``jax.default_device``."""

    def __init__(self, devices: Sequence[Any]) -> None:
        """Makes the placement.

        Args:
            devices: The one device.
        """
        super().__init__(devices)
        self._sharding = SingleDeviceSharding(devices[0])

    def state(self, state: Any, variables: Any) -> Any:
        """Moves what is bound to other devices, say by another strategy that shares the layer."""
        del variables
        return jax.tree.map(self._here, _apart(state))

    def batch(self, batch: Any, axis: int = 0) -> Any:
        """Moves what the user bound to another device."""
        del axis
        return jax.tree.map(self._here, batch) if _any_committed(jax.tree.leaves(batch)) else batch

    def divided(self, batch: Any) -> Any:
        """Does nothing."""
        return batch

    def compile(self, step: Step, axis: int = 0) -> Step:
        """Compiles as Keras does."""
        del axis
        return jax.jit(step, donate_argnums=0)

    def _here(self, leaf: Any) -> Any:
        bound_elsewhere = (
            isinstance(leaf, jax.Array) and leaf.committed and leaf.sharding != self._sharding
        )
        return jax.device_put(leaf, self._sharding) if bound_elsewhere else leaf


@final
class MeshPlacement(Placement):
    """State on every device, batches divided along the axis of their examples.

    A batch that can be divided evenly enters a step divided. JAX takes no other one that way, so it
    enters whole, on every device, and is divided inside the step, where XLA pads an uneven axis by
    itself, exactly: of 17 examples on 4 devices, each computes 5 rows.

    Attributes:
        layout: The devices, and what each of them holds.
        mesh: The devices.
        whole: How an array lies that is on every device.
        pieces: How an array lies whose first axis is divided among the replicas.
        home: The device that alone holds the state between programs; None: it stays on the mesh.
    """

    def __init__(self, layout: Layout, home: Any = None) -> None:
        """Makes the placement.

        Args:
            layout: The devices, of one kind, and what each of them holds.
            home: The device that alone holds the state between programs.
        """
        first = layout.mesh.devices.flat[0]
        on_host = first.platform == "cpu"
        # A variable that is to be cut may be too large for one accelerator, so it is made on the
        # host.
        split = layout.splits.logical_devices > 1
        super().__init__([home or (jax.local_devices(backend="cpu")[0] if split else first)])
        self.layout = layout
        self.home = home
        self.mesh, self.whole, self.pieces = layout.mesh, layout.whole, layout.rows(0)
        self._pieces = (self.pieces, layout.rows(1))
        self.flow = ALL_CPUS if on_host else FreeFlow()
        self.places_ahead = not on_host

    def state(self, state: Any, variables: Any) -> Any:
        """Sends to every device what is not there yet, in one transfer."""
        leaves, structure = jax.tree.flatten(_apart(state))
        if self.home is None:
            placed = self.arrays(leaves, jax.tree.leaves(variables))
        else:
            placed = self.at_rest(leaves)
        return jax.tree.unflatten(structure, placed)

    def constrained(self, arrays: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Says, inside a program, how new values of variables leave it.

        Args:
            arrays: Traced arrays.
            variables: The Keras variables whose values they are.
        """
        constrain = jax.lax.with_sharding_constraint
        return list(map(constrain, arrays, self.layout.of_variables(variables)))

    def at_rest(self, arrays: list[Any]) -> list[Any]:
        """Returns arrays as they are kept between programs: on the mesh, or back home.

        Args:
            arrays: Arrays, on the mesh or anywhere.
        """
        if self.home is None:
            return arrays
        there = SingleDeviceSharding(self.home)
        return [
            one
            if one.committed and one.sharding == there
            else jax.device_put(one.addressable_data(0), there)
            for one in arrays
        ]

    def arrays(self, arrays: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Sends to every device what is not there yet; the same list, if all is.

        Args:
            arrays: Arrays.
            variables: The Keras variables whose values they are.
        """
        targets = self.layout.of_variables(variables)
        absent = [
            index
            for index, (array, target) in enumerate(zip(arrays, targets, strict=True))
            if not _is_placed(array, target)
        ]
        if not absent:
            return arrays
        everywhere = list(arrays)
        placed = jax.device_put(
            [arrays[index] for index in absent], [targets[index] for index in absent]
        )
        for index, array in zip(absent, placed, strict=True):
            everywhere[index] = array
        return everywhere

    def batch(self, batch: Any, axis: int = 0) -> Any:
        """Sends each accelerator its rows; on the CPU the step takes them from NumPy, for less."""
        leaves = jax.tree.leaves(batch)
        if not self.places_ahead and not _any_committed(leaves):
            return batch
        sharding = self._on_entry(leaves, axis)
        if all(_is_placed(leaf, sharding) for leaf in leaves):
            return batch
        return jax.device_put(batch, sharding)

    def divided(self, batch: Any) -> Any:
        """Constrains the first axis to the mesh."""

        def constrained(leaf: Any) -> Any:
            # Of fewer examples than replicas nothing is worth dividing.
            if leaf.ndim == 0 or leaf.shape[0] < self.layout.replicas:
                return leaf
            return jax.lax.with_sharding_constraint(leaf, self.pieces)

        return jax.tree.map(constrained, batch)

    def compile(self, step: Step, axis: int = 0) -> Step:
        """Compiles for batches that enter divided, and for those that enter whole."""

        def program(state: Any, batch: Any) -> tuple[Any, Any]:
            outputs, state = step(state, batch)
            return jax.tree.map(self._returned, outputs), state

        # Every sharding is said: left to itself, XLA divides arrays in ways JAX has no name for.
        programs: dict[Any, Step] = {}

        def run(state: Any, batch: Any) -> tuple[Any, Any]:
            entry = self._on_entry(jax.tree.leaves(batch), axis)
            if self.home is not None:
                state = jax.device_put(state, self.whole)
            held = self._held(state)
            key = entry, held if held is self.whole else tuple(jax.tree.leaves(held))
            if key not in programs:
                programs[key] = jax.jit(
                    program,
                    donate_argnums=0,
                    in_shardings=(held, entry),
                    out_shardings=(None, held),
                )
            outputs, state = programs[key](state, batch)
            if self.home is not None:
                leaves, structure = jax.tree.flatten(state)
                state = jax.tree.unflatten(structure, self.at_rest(leaves))
            return outputs, state

        return run

    def _held(self, state: Any) -> Any:
        """What each device holds of the state: one sharding for all, or one for each array."""
        if not self.layout.splits.rules:
            return self.whole
        return jax.tree.map(lambda leaf: leaf.sharding, state)

    def _on_entry(self, leaves: Sequence[Any], axis: int) -> NamedSharding:
        """How a batch enters a step."""
        replicas = self.layout.replicas
        shapes = map(np.shape, leaves)
        even = all(len(shape) > axis and shape[axis] % replicas == 0 for shape in shapes)
        return self._pieces[axis] if even else self.whole

    def _returned(self, leaf: Any) -> Any:
        """How an output leaves it."""
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.lax.with_sharding_constraint(leaf, self._on_entry([leaf], axis=0))


def _apart(state: Any) -> Any:
    """Copies an array that is the value of two variables, since a step consumes each array once.

    Keras assigns one variable's array to another where it overwrites weights with their moving
    average; a second `fit` then fails in plain Keras (seen with 3.15.1).
    """
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        if id(leaf) in seen:
            return jnp.copy(leaf)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(own, state)


def _any_committed(leaves: Sequence[Any]) -> bool:
    """Whether a JAX array was bound to its device by somebody; JAX moves the others by itself."""
    return any(isinstance(leaf, jax.Array) and leaf.committed for leaf in leaves)


def _is_placed(leaf: Any, sharding: NamedSharding) -> bool:
    # Mostly it is the same object, and to compare meshes takes time.
    return isinstance(leaf, jax.Array) and (leaf.sharding is sharding or leaf.sharding == sharding)
