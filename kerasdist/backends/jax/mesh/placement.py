"""Places the arrays of a step on a mesh of devices."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, final

import jax
import keras
import numpy as np
from jax import numpy as jnp
from jax.sharding import Sharding, SingleDeviceSharding

from kerasdist.agreement import results
from kerasdist.backends.jax.fit import donation
from kerasdist.backends.jax.mesh.arrays import copied, in_device_memory, is_placed, local_copy
from kerasdist.backends.jax.mesh.gathers import in_groups
from kerasdist.backends.jax.mesh.host_memory import constrained
from kerasdist.backends.jax.mesh.layout import Layout, in_step

if TYPE_CHECKING:
    from kerasdist.job.job import Job

# A function that takes state and batch, and returns outputs and new state, all as pytrees.
Step = Callable[[Any, Any], tuple[Any, Any]]

STEPS_AHEAD = 8
"""On CPU devices the host waits for the devices once per this many steps (`_wait_sometimes`)."""

# One counter is enough for all strategies, because all programs of a process use the same queues.
_launches = itertools.count(1)


class OtherStateError(Exception):
    """A step changes the shapes or types of its state, which XLA's loops do not support."""


def _wait_sometimes(outputs: object, state: object, steps: int = 1) -> None:
    """Counts the steps of a launch on CPU devices; waits for a result every `STEPS_AHEAD` steps.

    Accelerators need no such wait, because there JAX's own limit of programs in flight is enough.
    On several CPU devices JAX can deadlock. Each device lets 32 programs be in flight
    (``max_inflight_computations_per_device`` in XLA's CPU client). The launch of the next program
    waits *inside* the thread pool that also runs the programs. The pool has one thread for each
    core, or for each device if there are more devices than cores. For example, on two cores, one
    thread of the pool waits for a launch. The other thread waits in an all-reduce for the second
    device, whose program finds no thread: "Expected 2 threads to join the rendezvous, but only 1 of
    them arrived". After 40 seconds XLA aborts the process. The stacks of a hanging process show
    ``xla::Semaphore::Acquire`` under ``ExecuteLaunch`` in one thread and
    ``InProcessCommunicator::AllReduce`` in the other. A larger pool (``NPROC=8``, before JAX
    starts) prevents the deadlock. So does a limit for the programs in flight, such as
    `STEPS_AHEAD`. The limit must be well below 32, because callbacks and user code also launch
    programs. Seen with jaxlib 0.10.2.
    """
    due = next(_launches) % STEPS_AHEAD == 0
    for _ in range(1, steps):
        due |= next(_launches) % STEPS_AHEAD == 0
    if due:
        leaves = jax.tree.leaves((outputs, state))
        there = (one for one in leaves if isinstance(one, jax.Array) and not one.is_deleted())
        jax.block_until_ready(next(there, None))


class Placement:
    """Keeps state on every device of a mesh, and shards batches along the axis of their examples.

    A batch is sharded before it enters a step if the replicas can divide the batch evenly. JAX
    cannot shard any other batch from outside of a program. So every device gets all rows of an
    uneven batch, and the step itself shards the rows. XLA then pads the uneven axis without
    changing results: for 17 examples on 4 devices, each device computes 5 rows.

    Attributes:
        layout: The mesh, and the shardings of arrays on it.
        job: The job whose workers have the other devices of the mesh; None without other workers.
        mesh: The JAX mesh of all devices.
        whole: The sharding of an array of which every device holds a full copy.
        rows: The sharding of an array whose first axis is sharded over the replicas.
        devices: The devices on which programs run.
        host: The host as a device; the first device if JAX has no CPU device.
        keeps_state: Whether variables hold the same arrays that programs take and return, so that
            nothing is copied between programs.
        after_launch: A function that limits how far the host runs ahead of the devices. It is
            called after each launch of a program, with the program's outputs, new state and number
            of steps.
        places_ahead: Whether `batch` moves a batch to the devices while the previous step runs.
        shares_memory: Whether arrays on the devices may use the memory of NumPy arrays, as on CPUs.
        begin_step: A function that is called before each program of a custom loop.
    """

    job: Job | None = None
    after_launch: Callable[..., None] = staticmethod(lambda *_: None)
    keeps_state = True

    def __init__(
        self, layout: Layout, begin_step: Callable[[], None] = lambda: None, home: Any = None
    ) -> None:
        """Stores the layout, and the device `home` on which new variables are made.

        If `home` is None, they are made on this process's first device, or on the host if a replica
        has several logical devices.
        """
        self.layout = layout
        self.mesh, self.whole, self.rows = layout.mesh, layout.whole, layout.rows
        self.devices = tuple(layout.mesh.devices.flat)
        self.begin_step = begin_step
        # A variable that will be split over logical devices may be too large for one accelerator,
        # so the variable is made on the host.
        self.host = _host_or(layout.local[0])
        self._home = home or (self.host if layout.splits.logical_devices > 1 else layout.local[0])
        on_cpu = layout.local[0].platform == "cpu"
        if on_cpu:
            self.after_launch = _wait_sometimes
        self.places_ahead = not on_cpu
        self.shares_memory = on_cpu

    def variables(self) -> AbstractContextManager[Any]:
        """Returns a context in which new variables are made on the device `home`."""
        chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
        default = chosen or jax.local_devices()[0]
        # The default device is set only if needed, because JAX recompiles functions after a change
        # of the default device.
        if default == self._home:
            return contextlib.nullcontext()
        return jax.default_device(self._home)

    def state(self, state: Any, variables: Any) -> Any:
        """Puts the values of variables on the mesh, except those that are already there."""
        leaves, structure = jax.tree.flatten(_apart(state))
        return jax.tree.unflatten(structure, self.enter(leaves, jax.tree.leaves(variables)))

    def enter(
        self, arrays: list[jax.Array], variables: Sequence[keras.Variable]
    ) -> list[jax.Array]:
        """Moves variables' values to the mesh; returns the same list if all are already there."""
        placed = list(map(self.put, arrays, self.layout.of_variables(variables)))
        return arrays if all(map(operator.is_, arrays, placed)) else placed

    def leave(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """Converts a program's new values to what variables hold. Here, nothing is converted."""
        return arrays

    def put(self, array: Any, sharding: Sharding) -> jax.Array:
        """Puts a full array on the mesh; an array that is already there is returned unchanged."""
        return array if is_placed(array, sharding) else jax.device_put(local_copy(array), sharding)

    def equalize(self, variables: Sequence[keras.Variable]) -> None:
        """Gives variables the chief's values. Does nothing here, because there is one worker."""

    def read(self, array: jax.Array) -> jax.Array:
        """Returns an array's full value. If it is sharded, all workers must call this method."""
        return array if array.is_fully_replicated else jax.device_put(array, self.whole)

    def argument(self, array: Any) -> Any:
        """Puts a user's array on every device, unless it is sharded over the replicas already."""
        return array if is_placed(array, self.rows) else self.put(array, self.whole)

    def assemble(self, parts: Sequence[Any], shape: tuple[int, ...]) -> jax.Array:
        """Makes an array, sharded over the replicas, from the rows of this process's replicas."""
        first, rows = self.layout.local_replicas.start, shape[0] // self.layout.replicas

        def part(index: Any) -> Any:
            return parts[(index[0].start or 0) // rows - first]

        return jax.make_array_from_callback(shape, self.rows, part)

    def copy_if_shared(self, rows: Any) -> Any:
        """Copies rows if JAX would share NumPy's memory, which the user may overwrite."""
        needs_copy = self.shares_memory and not isinstance(rows, jax.Array)
        return np.array(rows) if needs_copy else rows

    def copy_batch(self, batch: object) -> object:
        """Copies a batch if JAX would share its memory, which the data source may overwrite."""
        return jax.tree.map(self.copy_if_shared, batch)

    def wait_until_sent(self, arrays: Any) -> Any:
        """Waits until accelerators have copied NumPy arrays, but not until steps have run."""
        return arrays if self.shares_memory else jax.block_until_ready(arrays)

    def batch(self, batch: Any) -> Any:
        """Sends each accelerator its rows; on CPUs the step itself reads the rows from NumPy."""
        leaves = jax.tree.leaves(batch)
        # JAX moves an array to the mesh by itself, unless the array is committed to its device.
        is_bound = any(isinstance(leaf, jax.Array) and leaf.committed for leaf in leaves)
        if not self.places_ahead and not is_bound:
            return batch
        sharding = self.layout.entry(leaves)
        return jax.tree.map(lambda leaf: self.put(leaf, sharding), batch)

    def eager(self, step: Step) -> Callable[..., tuple[list[Any], Any]]:
        """Returns a function that is called like a `CompiledStep`, but runs the step eagerly.

        The function takes one batch. Each operation of the step runs on all devices.
        """

        def run(state: object, batches: Sequence[Any]) -> tuple[list[Any], Any]:
            [batch] = batches
            self._note_batch(batch)
            before = [leaf.sharding for leaf in jax.tree.leaves(state)]
            outputs, new = step(jax.tree.map(self._on_device, state), batch)
            # Only the leaves are used, because plain Keras also allows a user's step to return the
            # state in other containers.
            leaves, structure = jax.tree.flatten(new)
            state = jax.tree.unflatten(structure, map(self.put, leaves, before))
            logs, form = jax.tree.flatten(outputs)
            logs = [self.read(leaf) if isinstance(leaf, jax.Array) else leaf for leaf in logs]
            return [jax.tree.unflatten(form, logs)], state

        return run

    def _on_device(self, array: jax.Array) -> jax.Array:
        return self.put(array, in_device_memory(array.sharding))

    def shard_batch(self, batch: Any) -> Any:
        """Constrains the first axis of a batch to be sharded over the replicas."""

        def constrained(leaf: Any) -> Any:
            # A batch with fewer examples than replicas is not divided.
            if leaf.ndim == 0 or leaf.shape[0] < self.layout.replicas:
                return leaf
            return jax.lax.with_sharding_constraint(leaf, self.rows)

        return jax.tree.map(constrained, batch)

    def launch(
        self, program: Any, state: Any, batches: Sequence[Any], seen: dict[Hashable, str]
    ) -> tuple[Any, Any]:
        """Runs a program that takes a step with each batch.

        If several workers compare their programs, `seen` has the digests of the programs that have
        run, by the shapes of their batches.
        """
        with donation.launching:
            return program(state, batches)

    def _note_batch(self, batch: Any) -> None:
        """With several workers, notes the shapes of an eager step's batch. Does nothing here."""

    def compare(self, program: Any, *arguments: object) -> str:
        """Compares a new program on all workers. Returns its digest, or "" for a single worker."""
        if self.job is None:
            return ""
        # JAX caches the lowered program, so the launch does not lower the program again.
        return results.require_equal_programs(self.job, program.lower(*arguments).as_text())

    def record(self, *what: object) -> None:
        """Records that a program starts, if the user has asked for a record of collectives."""
        if self.job is not None and self.job.collectives is not None:
            self.job.collectives.record("program", " ".join(map(str, what)))

    def returned(self, leaf: Any, *, keeps_rows: bool) -> Any:
        """Constrains the sharding of an output, inside a step."""
        # `keeps_rows` changes nothing here, because one process can read the rows of all devices.
        return constrained(leaf, self.layout.entry([leaf]))


@final
class CentralPlacement(Placement):
    """Keeps variables on one device; every program copies them to the mesh and back."""

    keeps_state = False

    def __init__(self, layout: Layout, device: Any) -> None:
        super().__init__(layout, home=device)
        self._there = SingleDeviceSharding(device)

    def state(self, state: Any, variables: Any) -> Any:
        """Moves arrays to the device of the variables."""
        return jax.device_put(_apart(state), self._there)

    def enter(
        self, arrays: list[jax.Array], variables: Sequence[keras.Variable]
    ) -> list[jax.Array]:
        """Copies variables' values to every device of the mesh."""
        return jax.device_put(arrays, self.layout.of_variables(variables))

    def leave(self, arrays: Any) -> Any:
        """Moves variables' new values to the device of the variables."""
        here = jax.tree.map(lambda one: one.addressable_data(0), arrays)
        return jax.device_put(here, self._there)

    def launch(
        self, program: Any, state: Any, batches: Sequence[Any], seen: dict[Hashable, str]
    ) -> tuple[Any, Any]:
        """Runs a program. The state is on the mesh only while the program runs."""
        state = jax.device_put(state, self.whole)
        outputs, new = super().launch(program, state, batches, seen)
        return outputs, self.leave(new)


@final
class CompiledStep:
    """A step, which is compiled separately for sharded batches and for whole batches.

    A call consumes (donates) the arrays of the state.
    """

    def __init__(self, place: Placement, step: Step, *, keeps_rows: bool = False) -> None:
        """Stores the step, which is compiled when it is called.

        Args:
            place: The placement, which launches the step's programs.
            step: The function that computes one step.
            keeps_rows: Whether the outputs are rows that Keras keeps, as in `predict`.
        """
        self._place = place
        self._step = step
        self._keeps_rows = keeps_rows
        self._programs: dict[Any, Any] = {}
        self._seen: dict[Hashable, str] = {}

    def __call__(self, state: Any, batches: Sequence[Any]) -> tuple[list[Any], Any]:
        """Runs a step with each batch, in one program; all batches have equal shapes and types.

        Returns a list of outputs (of every step if Keras keeps the rows, else of the last step) and
        the new state. Raises `OtherStateError`, before anything has run, if there are several
        batches and XLA cannot loop over the step.
        """
        return self._place.launch(self.program(state, batches), state, batches, self._seen)

    def bytes_needed(self, state: Any, batches: Sequence[Any]) -> int:
        """Compiles a program; returns how much memory of a device it takes beside its arguments."""
        if not self._place.keeps_state:
            state = jax.device_put(state, self._place.whole)
        # JAX caches the compiled program, so a later call does not compile the program again.
        memory = self.program(state, batches).lower(state, batches).compile().memory_analysis()
        outputs = max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes)
        return memory.temp_size_in_bytes + memory.generated_code_size_in_bytes + outputs

    def program(self, state: Any, batches: Sequence[Any]) -> Any:
        """Returns the jitted program for arrays of these shapes and shardings."""
        layout = self._place.layout
        held: Any = layout.whole
        entry = layout.entry(jax.tree.leaves(batches))
        if layout.shards_state:
            held = jax.tree.map(lambda leaf: leaf.sharding, state)
        key = entry, *jax.tree.leaves(held)
        if key not in self._programs:
            self._programs[key] = self._jitted(held, entry)
        return self._programs[key]

    def _jitted(self, held: Any, entry: Any) -> Any:
        place, layout, step = self._place, self._place.layout, self._step
        returned = partial(place.returned, keeps_rows=self._keeps_rows)
        options: dict[str, str] = {}
        if layout.rule is not None and layout.rule.gathers_weights:
            step = in_groups(step)
            if place.shares_memory:
                # Without this option, XLA on CPUs removes the optimization barriers early, and then
                # merges all-reduces that the barriers should keep apart.
                options = {"xla_disable_hlo_passes": "cse_barrier_expander"}

        def program(state: object, batches: Sequence[Any]) -> tuple[Any, Any]:
            with in_step(layout), layout.outputs:
                if len(batches) > 1:
                    outputs, state = _take_steps(step, held, self._keeps_rows, state, batches)
                else:
                    output, state = step(state, batches[0])
                    outputs = [output]
            return jax.tree.map(returned, outputs), state

        # All shardings are given explicitly, because XLA may choose one that JAX cannot express.
        return jax.jit(
            program,
            donate_argnums=0,
            in_shardings=(held, entry),
            out_shardings=(None, held),
            compiler_options=options,
        )


def _take_steps(
    step: Step, held: object, keeps_rows: bool, state: object, batches: Sequence[object]
) -> tuple[list[Any], Any]:
    """Runs a step with each batch in one XLA loop; `held` is the state's sharding."""
    structure = jax.tree.structure(state)

    def take_one(state: object, batch: object) -> tuple[object, object]:
        outputs, new = step(state, batch)
        if _types(new) != _types(state):
            raise OtherStateError
        # Plain Keras also allows a user's step to return the state in other containers, but
        # `jax.lax.scan` needs the same containers.
        new = jax.tree.unflatten(structure, jax.tree.leaves(new))
        return jax.lax.with_sharding_constraint(new, held), outputs

    stack = jax.tree.map(lambda *parts: jnp.stack(parts), *batches)
    state, outputs = jax.lax.scan(take_one, state, stack)
    kept = range(len(batches)) if keeps_rows else [-1]
    return [jax.tree.map(operator.itemgetter(at), outputs) for at in kept], state


def _types(state: object) -> list[object]:
    return [(np.shape(leaf), jnp.result_type(leaf)) for leaf in jax.tree.leaves(state)]


def _host_or(accelerator: object) -> Any:
    """Returns the host as a device; if `JAX_PLATFORMS` excludes the CPU, the given accelerator."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return accelerator


def _apart(state: object) -> Any:
    """Copies an array that is the value of two variables, because JAX can donate it only once.

    Keras assigns one variable's array to another when it overwrites weights with their moving
    average. In plain Keras a second `fit` then fails (seen with 3.15.1).
    """
    leaves, structure = jax.tree.flatten(state)
    seen: set[int] = set()
    for index, leaf in enumerate(leaves):
        if id(leaf) in seen:
            leaves[index] = copied(leaf)
        seen.add(id(leaf))
    return jax.tree.unflatten(structure, leaves)
