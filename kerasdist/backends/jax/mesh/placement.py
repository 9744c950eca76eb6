"""Where the arrays of a step live: on one device, or on a mesh of devices."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, final

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from kerasdist.backends.jax.fit import donation
from kerasdist.backends.jax.fit.backpressure import ALL_CPUS, BoundedFlow, FreeFlow
from kerasdist.backends.jax.mesh.arrays import is_placed
from kerasdist.backends.jax.mesh.layout import Layout, in_step

# Takes state and batch, returns outputs and new state, all of them pytrees.
Step = Callable[[Any, Any], tuple[Any, Any]]


class Placement(abc.ABC):
    """Places the arrays of a step on devices, and compiles the step for them.

    Attributes:
        devices: The devices on which programs run.
        flow: Limits how far the host runs ahead of the devices.
        places_ahead: Whether to move a batch while the step before it still runs.
        shares_memory: Whether arrays on the devices may use the memory of NumPy arrays, as on CPUs.
        begin_step: Called before every user program.
        note_batch: Called with the shapes of each batch in `fit`, `evaluate` and `predict`.
    """

    flow: FreeFlow | BoundedFlow = FreeFlow()
    places_ahead: bool = False
    shares_memory: bool = True
    begin_step: Callable[[], None] = staticmethod(lambda: None)
    note_batch: Callable[[Hashable], None] = staticmethod(lambda _: None)

    def __init__(self, devices: Iterable[Any], home: Any) -> None:
        """Takes the devices of programs, and the device on which new variables are made."""
        self.devices = tuple(devices)
        self._home = home

    def variables(self) -> AbstractContextManager[Any]:
        """Returns a context in which new variables are made on their device."""
        chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
        default = chosen or jax.local_devices()[0]
        # JAX compiles a function again for another default device, so only set one if needed.
        if default == self._home:
            return contextlib.nullcontext()
        return jax.default_device(self._home)

    @abc.abstractmethod
    def state(self, state: Any, variables: Any) -> Any:
        """Returns a model's state on a compiled step's devices; moves arrays that are elsewhere."""

    @abc.abstractmethod
    def batch(self, batch: Any, axis: int = 0) -> Any:
        """Returns a batch on the devices of a compiled step, divided along `axis` if possible."""

    def at_rest(self, state: Any) -> Any:
        """Returns state in the form kept between programs, in which user code reads it."""
        return state

    def equalize(self, variables: Sequence[Any]) -> None:
        """Gives variables the chief's values; here there are no other workers."""
        del variables

    def here(self, leaf: Any) -> Any:
        """Returns an argument that this process can compute with; of a global array, some rows."""
        return leaf

    def stack(self, batches: Sequence[Any]) -> Any:
        """Stacks batches along a new first axis."""
        return _stacked(*batches)

    def eager(self, step: Step) -> Step:
        """Returns a step that runs operation by operation."""
        return step

    @abc.abstractmethod
    def divided(self, batch: Any) -> Any:
        """Constrains a batch, inside a compiled step, to be divided over the replicas."""

    @abc.abstractmethod
    def compile(self, step: Step, axis: int = 0, *, keeps_rows: bool = False) -> Step:
        """Compiles a step, and lets JAX donate the state that is passed to it.

        `keeps_rows`: whether its outputs are rows that Keras keeps, as those of `predict`.
        """

    @abc.abstractmethod
    def program(self, step: Step, state: Any, batch: Any, axis: int = 0) -> Any:
        """Returns the jitted program of a step; of state and batch only shapes are looked at."""


@final
class OneDevicePlacement(Placement):
    """Keeps everything on one device, as plain Keras does by ``jax.default_device``."""

    def __init__(self, devices: Sequence[Any]) -> None:
        super().__init__(devices, devices[0])
        self._sharding = SingleDeviceSharding(devices[0])

    def state(self, state: Any, variables: Any) -> Any:
        """Moves arrays committed to other devices, say by another strategy that shares a layer."""
        del variables
        return jax.tree.map(self._here, _apart(state))

    def batch(self, batch: Any, axis: int = 0) -> Any:
        """Moves a batch to this device if the user has bound arrays of it to another one."""
        del axis
        return jax.tree.map(self._here, batch) if _any_committed(jax.tree.leaves(batch)) else batch

    def divided(self, batch: Any) -> Any:
        """Returns the batch unchanged: there is nothing to divide."""
        return batch

    def compile(self, step: Step, axis: int = 0, *, keeps_rows: bool = False) -> Step:
        """Compiles as Keras does."""
        program = jax.jit(step, donate_argnums=0)

        def run(state: Any, batch: Any) -> tuple[Any, Any]:
            with donation.launching:
                return program(state, batch)

        del axis, keeps_rows
        return run

    def program(self, step: Step, state: Any, batch: Any, axis: int = 0) -> Any:
        """Returns the jitted program of a step, which is the same for all shapes."""
        del state, batch, axis
        return jax.jit(step, donate_argnums=0)

    def _here(self, leaf: Any) -> Any:
        bound_elsewhere = (
            isinstance(leaf, jax.Array) and leaf.committed and leaf.sharding != self._sharding
        )
        return jax.device_put(leaf, self._sharding) if bound_elsewhere else leaf


class MeshPlacement(Placement):
    """Keeps state on every device, and divides batches along the axis of their examples.

    A batch that can be divided evenly is divided before it enters a step. JAX does not divide other
    batches there: they enter whole, on every device, and are divided inside the step, where XLA
    pads an uneven axis without changing results: of 17 examples on 4 devices, each computes 5 rows.

    Attributes:
        layout: The mesh, and the shardings of arrays on it.
        mesh: The JAX mesh of all devices.
        whole: The sharding of an array that every device holds.
        pieces: The sharding of an array whose first axis is divided over the replicas.
        rests_after_each_step: Whether state takes the form kept between programs (see `at_rest`)
            after every step of `fit`, or only when Keras or the user reads it.
    """

    rests_after_each_step = False

    def __init__(self, layout: Layout, device: Any = None) -> None:
        if device is None:
            # A variable that is to be cut may be too large for one accelerator: the host makes it.
            cut = layout.splits.logical_devices > 1
            device = _host_or(layout.local[0]) if cut else layout.local[0]
        super().__init__(layout.mesh.devices.flat, device)
        self.layout = layout
        self.mesh, self.whole, self.pieces = layout.mesh, layout.whole, layout.rows[0]
        on_cpu = layout.local[0].platform == "cpu"
        self.flow = ALL_CPUS if on_cpu else FreeFlow()
        self.places_ahead = not on_cpu
        self.shares_memory = on_cpu

    def state(self, state: Any, variables: Any) -> Any:
        """Moves arrays to their devices in one transfer, except those that are already there."""
        leaves, structure = jax.tree.flatten(_apart(state))
        owners = jax.tree.leaves(variables)
        leaves = self.to_rest(leaves, owners)
        if not self.rests_after_each_step:
            leaves = self.to_program(leaves, owners)
        return jax.tree.unflatten(structure, leaves)

    def at_rest(self, state: Any) -> Any:
        """Returns state in the form kept between programs."""
        leaves, structure = jax.tree.flatten(state)
        return jax.tree.unflatten(structure, self.from_program(leaves))

    def to_rest(self, arrays: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Converts variables' values to the form kept between programs, if they are not yet."""
        return moved(arrays, self.layout.of_variables(variables))

    def to_program(self, arrays: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Converts variables' values, as kept between programs, to a program's inputs."""
        del variables
        return arrays

    def from_program(self, arrays: list[Any]) -> list[Any]:
        """Converts a program's outputs to the form in which arrays are kept between programs."""
        return arrays

    def together(self, work: str, fact: Callable[[], Any]) -> AbstractContextManager[bool]:
        """Returns a context for work on a divided variable between programs.

        All workers must enter it. It yields whether `fact()` is equal on all of them.
        """
        del work, fact
        return contextlib.nullcontext(True)

    def scattered(self, array: Any, sharding: NamedSharding) -> Any:
        """Divides a whole array; returns one that is divided so unchanged."""
        return array if is_placed(array, sharding) else jax.device_put(array, sharding)

    def gathered(self, array: Any) -> Any:
        """Returns the whole value of a divided variable, on each device."""
        return jax.device_put(array, self.whole)

    def constrained(self, arrays: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Constrains the shardings of variables' new values, inside a program."""
        constrain = jax.lax.with_sharding_constraint
        return list(map(constrain, arrays, self.layout.of_variables(variables)))

    def result(self, array: Any) -> Any:
        """Converts a program's result to the array that the user gets."""
        return array

    def argument(self, array: Any) -> Any:
        """Converts a user's array to a program's input; JAX itself moves uncommitted arrays."""
        if not isinstance(array, jax.Array) or not array.committed:
            return array
        return array if array.sharding in (self.whole, self.pieces) else self.everywhere(array)

    def everywhere(self, array: Any) -> Any:
        """Copies an array to every device."""
        return jax.device_put(array, self.whole)

    def spread(self, stack: Any) -> Any:
        """Sends each replica its element along axis 0 of an array that is whole in this process."""
        return jax.device_put(stack, self.pieces)

    def lasting(self, rows: Any) -> Any:
        """Copies rows where JAX may share NumPy's memory, which the user may overwrite."""
        needs_copy = self.shares_memory and not isinstance(rows, jax.Array)
        return np.array(rows) if needs_copy else rows

    def sent(self, arrays: Any) -> Any:
        """Waits until accelerators have read NumPy's memory; steps that run there go on."""
        return arrays if self.shares_memory else jax.block_until_ready(arrays)

    def batch(self, batch: Any, axis: int = 0) -> Any:
        """Sends each accelerator its rows; on the CPU the step itself takes them from NumPy."""
        leaves = jax.tree.leaves(batch)
        if not self.places_ahead and not _any_committed(leaves):
            return batch
        sharding = self.layout.entry(leaves, axis)
        if all(is_placed(leaf, sharding) for leaf in leaves):
            return batch
        return jax.device_put(batch, sharding)

    def wholly(self, state: Any) -> Any:
        """Returns state that is whole, for code that runs operation by operation."""
        return state if self.layout.rule is None else jax.device_put(state, self.whole)

    def eager(self, step: Step) -> Step:
        """Returns a step that runs operation by operation, on state that is whole meanwhile."""
        if self.layout.rule is None:
            return step

        def run(state: Any, batch: Any) -> tuple[Any, Any]:
            outputs, new = step(self.wholly(state), batch)
            return outputs, self._divided_as(state, new)

        return run

    def _divided_as(self, before: Any, after: Any) -> Any:
        """Divides whole state as it was before a step."""
        leaves, structure = jax.tree.flatten(after)
        shardings = [leaf.sharding for leaf in jax.tree.leaves(before)]
        return jax.tree.unflatten(structure, list(map(self.scattered, leaves, shardings)))

    def divided(self, batch: Any) -> Any:
        """Constrains the first axis to be divided over the replicas."""

        def constrained(leaf: Any) -> Any:
            # Fewer examples than replicas are not worth dividing.
            if leaf.ndim == 0 or leaf.shape[0] < self.layout.replicas:
                return leaf
            return jax.lax.with_sharding_constraint(leaf, self.pieces)

        return jax.tree.map(constrained, batch)

    def stack(self, batches: Sequence[Any]) -> Any:
        """Stacks batches that are on the mesh."""
        leaves = jax.tree.leaves(batches[0])
        if not any(isinstance(leaf, jax.Array) for leaf in leaves):
            return _stacked(*batches)
        target = self.layout.rows[1] if self.layout.entry(leaves, 0) is self.pieces else self.whole
        return self._stackers[target](*batches)

    @cached_property
    def _stackers(self) -> dict[Any, Any]:
        targets = self.whole, self.layout.rows[1]
        return {one: jax.jit(_stack, out_shardings=one) for one in targets}

    def compile(self, step: Step, axis: int = 0, *, keeps_rows: bool = False) -> Step:
        """Compiles a program for batches that enter divided, and one for those that enter whole."""
        programs: dict[Any, Any] = {}
        seen: dict[Hashable, str] = {}

        def run(state: Any, batch: Any) -> tuple[Any, Any]:
            leaves = jax.tree.leaves(batch)
            entry = self.layout.entry(leaves, axis)
            if self.rests_after_each_step:
                state = jax.device_put(state, self.whole)
            held = self._held(state)
            key = entry, held if held is self.whole else tuple(jax.tree.leaves(held))
            if key not in programs:
                programs[key] = self._jitted(step, held, entry, keeps_rows)
            self._note_step(programs[key], state, batch, seen)
            with donation.launching:
                outputs, state = programs[key](state, batch)
            if self.rests_after_each_step:
                state = self.at_rest(state)
            return self._results(outputs), state

        return run

    def _results(self, outputs: Any) -> Any:
        """Converts the outputs of a step to what Keras gets."""
        return outputs

    def program(self, step: Step, state: Any, batch: Any, axis: int = 0) -> Any:
        """Returns the jitted program of a step for arrays of these shapes and shardings."""
        entry = self.layout.entry(jax.tree.leaves(batch), axis)
        return self._jitted(step, self._held(state), entry)

    def _jitted(self, step: Step, held: Any, entry: Any, keeps_rows: bool = False) -> Any:
        returned = self._returned_rows if keeps_rows else self._returned

        def program(state: Any, batch: Any) -> tuple[Any, Any]:
            with in_step(self.layout):
                outputs, state = step(state, batch)
            return jax.tree.map(returned, outputs), state

        # Every sharding is explicit: XLA's own choice may be one that JAX cannot name.
        return jax.jit(
            program, donate_argnums=0, in_shardings=(held, entry), out_shardings=(None, held)
        )

    def _note_step(self, program: Any, state: Any, batch: Any, seen: dict[Hashable, str]) -> None:
        """Notes a batch and its program, if several workers compare theirs.

        `seen` has the programs that have run, by the shapes of their batches.
        """
        del program, state, batch, seen

    def compare(self, program: Any, *arguments: Any) -> None:
        """Compares a new program for these arguments, where there are several workers."""
        del program, arguments

    def _held(self, state: Any) -> Any:
        """Returns the sharding of the state: one for all arrays, or one for each."""
        if not self.layout.divides_state:
            return self.whole
        return jax.tree.map(lambda leaf: leaf.sharding, state)

    def _returned(self, leaf: Any) -> Any:
        """Constrains the sharding of an output, inside a step."""
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.lax.with_sharding_constraint(leaf, self._output_sharding(leaf))

    def _returned_rows(self, leaf: Any) -> Any:
        return self._returned(leaf)

    def _output_sharding(self, leaf: Any) -> NamedSharding:
        return self.layout.entry([leaf], axis=0)


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


def _host_or(accelerator: Any) -> Any:
    """Returns the host as a device; an accelerator where `JAX_PLATFORMS` leaves out the CPU."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return accelerator


def moved(arrays: list[Any], targets: Sequence[Sharding]) -> list[Any]:
    """Moves arrays to their shardings in one transfer; returns the same list if all have them."""
    pairs = enumerate(zip(arrays, targets, strict=True))
    absent = [index for index, (array, target) in pairs if not is_placed(array, target)]
    if not absent:
        return arrays
    everywhere = list(arrays)
    placed = jax.device_put([arrays[i] for i in absent], [targets[i] for i in absent])
    for index, array in zip(absent, placed, strict=True):
        everywhere[index] = array
    return everywhere


def _any_committed(leaves: Sequence[Any]) -> bool:
    """Whether a JAX array is committed to a device; JAX moves uncommitted ones itself."""
    return any(isinstance(leaf, jax.Array) and leaf.committed for leaf in leaves)


def _stack(*batches: Any) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)


_stacked = jax.jit(_stack)


def _apart(state: Any) -> Any:
    """Copies an array that is the value of two variables, since JAX donates each array only once.

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
