"""Where the arrays of a step live: on one device, or on a mesh of them."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, final

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import SingleDeviceSharding

from kerasdist.backends.jax.flow import ALL_CPUS, BoundedFlow, FreeFlow
from kerasdist.backends.jax.intake import OfProcess, OfWorkers, any_committed
from kerasdist.backends.jax.layout import Layout
from kerasdist.backends.jax.rest import AtHome, OnMesh, OnWorker, Rest

# Takes state and batch, returns outputs and state: whatever pytrees the user's step makes of them.
Step = Callable[[Any, Any], tuple[Any, Any]]


class Placement(abc.ABC):
    """Puts the arrays of a step where they belong, and compiles the step for there.

    Attributes:
        devices: The replicas' devices.
        flow: What keeps the host from running too far ahead of the devices.
        places_ahead: Whether to move a batch while the step before it still runs.
        begin_step: What to call before every user program.
        note_batch: What to call with the shapes of each batch of a step of `fit` and its like.
        compare_program: What to call with the text of the first program of a step.
    """

    flow: FreeFlow | BoundedFlow = FreeFlow()
    places_ahead: bool = False
    begin_step: Callable[[], None] = staticmethod(lambda: None)
    note_batch: Callable[[Hashable], None] = staticmethod(lambda _: None)
    compare_program: Callable[[str], None] = staticmethod(lambda _: None)

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

    def at_rest(self, state: Any) -> Any:
        """Returns state as it is kept between programs, and read by whoever is interested.

        Args:
            state: A pytree of arrays.
        """
        return state

    def stack(self, batches: Sequence[Any]) -> Any:
        """Returns batches along a new first axis.

        Args:
            batches: What `batch` returned, in one form.
        """
        return _stacked(*batches)

    def eager(self, step: Step) -> Step:
        """Returns a step that runs operation by operation.

        Args:
            step: A function of state and batch.
        """
        return step

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
        return jax.tree.map(self._here, batch) if any_committed(jax.tree.leaves(batch)) else batch

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
        rest: Where the state is while no program has it.
        intake: How batches get there.
    """

    def __init__(self, layout: Layout, home: Any = None) -> None:
        """Makes the placement.

        Args:
            layout: The devices, of one kind, and what each of them holds.
            home: The device that alone holds the state between programs.
        """
        self.rest = _rest(layout, home)
        super().__init__([self.rest.device])
        self.layout = layout
        self.mesh, self.whole, self.pieces = layout.mesh, layout.whole, layout.rows[0]
        self.intake = (
            OfWorkers(layout, self.rest) if isinstance(self.rest, OnWorker) else OfProcess(layout)
        )
        self._rests_whole = isinstance(self.rest, OnMesh) and not layout.splits.rules
        self.flow = ALL_CPUS if layout.local[0].platform == "cpu" else FreeFlow()
        self.places_ahead = self.intake.places_ahead

    def state(self, state: Any, variables: Any) -> Any:
        """Sends to every device what is not there yet, in one transfer."""
        leaves, structure = jax.tree.flatten(_apart(state))
        owners = jax.tree.leaves(variables)
        leaves = self.settled(leaves, owners)
        if not self.rest.after_each_step:
            leaves = self.entered(leaves, owners)
        return jax.tree.unflatten(structure, leaves)

    def constrained(self, arrays: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Says, inside a program, how new values of variables leave it.

        Args:
            arrays: Traced arrays.
            variables: The Keras variables whose values they are.
        """
        constrain = jax.lax.with_sharding_constraint
        return list(map(constrain, arrays, self.layout.of_variables(variables)))

    def at_rest(self, state: Any) -> Any:
        """Returns state as it is kept between programs."""
        leaves, structure = jax.tree.flatten(state)
        return jax.tree.unflatten(structure, self.rest.left(leaves))

    def ready(self, *arrays: Sequence[Any]) -> bool:
        """Returns whether values of variables are where a program takes them, as after a step.

        It may say no where they are: `settled` and `entered` look more closely.

        Args:
            arrays: The values, in one list or several.
        """
        if not self._rests_whole:
            return False
        shardings = [one.sharding for some in arrays for one in some]
        return shardings.count(self.whole) == len(shardings)

    def settled(self, arrays: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the values of variables as they are kept; the same list, if they are.

        Args:
            arrays: The values.
            variables: The Keras variables whose values they are.
        """
        return self.rest.settled(arrays, self.layout.of_variables(variables))

    def entered(self, arrays: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the values of variables as a program takes them.

        Args:
            arrays: The values, as they are kept.
            variables: The Keras variables whose values they are.
        """
        return self.rest.entered(arrays, self.layout.of_variables(variables))

    def result(self, array: Any) -> Any:
        """Returns a program's result as the user gets it, with several workers as one of theirs.

        Args:
            array: An array that is whole on every device.
        """
        return self.rest.left([array])[0] if self.layout.spans_workers else array

    def everywhere(self, array: Any) -> Any:
        """Returns an array that is whole on every device.

        Args:
            array: An array of this process.
        """
        return self.intake.whole(array)

    def batch(self, batch: Any, axis: int = 0) -> Any:
        """Returns a batch as a compiled step takes it."""
        return self.intake.batch(batch, axis)

    def spread(self, stack: Any) -> Any:
        """Gives each replica its element of an array that this process has whole.

        Args:
            stack: An array with an element a replica along its first axis.
        """
        return self.intake.spread(stack)

    def divided(self, batch: Any) -> Any:
        """Constrains the first axis to the mesh."""

        def constrained(leaf: Any) -> Any:
            # Of fewer examples than replicas nothing is worth dividing.
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

    def compile(self, step: Step, axis: int = 0) -> Step:
        """Compiles for batches that enter divided, and for those that enter whole."""

        def program(state: Any, batch: Any) -> tuple[Any, Any]:
            outputs, state = step(state, batch)
            return jax.tree.map(self._returned, outputs), state

        # Every sharding is said: left to itself, XLA divides arrays in ways JAX has no name for.
        programs: dict[Any, Any] = {}

        def run(state: Any, batch: Any) -> tuple[Any, Any]:
            leaves = jax.tree.leaves(batch)
            entry = self.layout.entry(leaves, axis)
            self._note(leaves)
            if self.rest.after_each_step:
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
                if self.layout.spans_workers and len(programs) == 1:
                    # JAX keeps what it lowers: it is done once, for this and for the call.
                    self.compare_program(_text(programs[key].lower(state, batch)))
            outputs, state = programs[key](state, batch)
            if self.rest.after_each_step:
                state = self.at_rest(state)
            return jax.tree.map(self.result, outputs), state

        return run

    def eager(self, step: Step) -> Step:
        """Lets a step run on the mesh; on each of several workers alone, with the whole batch."""
        if not self.layout.spans_workers:
            return step
        gather = jax.jit(lambda batch: batch, out_shardings=self.whole)

        def run(state: Any, batch: Any) -> tuple[Any, Any]:
            self._note(jax.tree.leaves(batch))
            return step(self.at_rest(state), self.at_rest(gather(batch)))

        return run

    def _note(self, leaves: Sequence[Any]) -> None:
        if self.layout.spans_workers:
            self.note_batch(tuple([np.shape(leaf) for leaf in leaves]))

    def _held(self, state: Any) -> Any:
        """What each device holds of the state: one sharding for all, or one for each array."""
        if not self.layout.splits.rules:
            return self.whole
        return jax.tree.map(lambda leaf: leaf.sharding, state)

    def _returned(self, leaf: Any) -> Any:
        """How an output leaves it: divided, unless other workers need it too."""
        if not isinstance(leaf, jax.Array):
            return leaf
        divided = not self.layout.spans_workers
        target = self.layout.entry([leaf], axis=0) if divided else self.whole
        return jax.lax.with_sharding_constraint(leaf, target)


def _text(lowered: Any) -> str:
    """A program without the places where it was written, and large constants only by their type."""
    module = lowered.compiler_ir("stablehlo").operation
    return module.get_asm(enable_debug_info=False, large_elements_limit=_LARGE_CONSTANT)


# Elements of a constant that are written down.
_LARGE_CONSTANT = 64


def _rest(layout: Layout, home: Any) -> Rest:
    if layout.spans_workers:
        return OnWorker(layout.local)
    if home is not None:
        return AtHome(home)
    # A variable that is to be cut may be too large for one accelerator, so it is made on the host.
    split = layout.splits.logical_devices > 1
    return OnMesh(jax.local_devices(backend="cpu")[0] if split else layout.local[0])


def _stack(*batches: Any) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)


_stacked = jax.jit(_stack)


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
