"""The members that every strategy has; ``tf.distribute`` gives them the same names and meaning."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NoReturn, final

from kerasdist.api.extended import StrategyExtended
from kerasdist.api.options import ReduceOp, RunOptions, options_of
from kerasdist.api.replica_context import ReplicaContext
from kerasdist.backends.base import weight_files
from kerasdist.backends.base.interface import ReplicaOptions, ReplicaSet
from kerasdist.backends.base.runner import Runner, SoleRunner
from kerasdist.core import context, ownership
from kerasdist.core.backend_choice import backend_choice, untested
from kerasdist.core.earlier_names import EarlierNames, refuse_arguments
from kerasdist.core.structures import Arguments, flatten, map_leaves, pack
from kerasdist.core.user_warnings import plural
from kerasdist.input.distributed import InputIterator, distributed, from_function
from kerasdist.input.options import InputContext, InputOptions, InputReplicationMode, ValueContext
from kerasdist.input.sources import RowDataset

if TYPE_CHECKING:
    from kerasdist.cluster.resolver import ClusterResolver

# The runner of the default strategy.
_ALONE = SoleRunner()

_logger = logging.getLogger("kerasdist")


class Strategy(EarlierNames):
    """The devices on which a model's replicas compute, and how the replicas train together.

    Do not create instances of this class: use `kerasdist.MirroredStrategy` or another subclass.
    Every member means the same as in ``tf.distribute.Strategy``.

    Example::

        strategy = kd.get_strategy()  # in no scope: the default strategy
        print(strategy.num_replicas_in_sync)

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy

    Attributes:
        is_used: Whether a model was made in the strategy's scope, or the strategy's `run` was
            called.
    """

    _resolver: ClusterResolver | None = None

    def __init__(self, replica_set: ReplicaSet | None) -> None:
        self.replica_set = replica_set  # None for the default strategy
        self.is_used = False
        ownership.remember(self)
        if replica_set is not None:
            _logger.info("%s", _described(self, replica_set))
            _log_untested_versions()

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas over which the strategy combines gradients."""
        return 1 if self.replica_set is None else self.replica_set.num_replicas

    @property
    def is_chief(self) -> bool:
        """Whether this process is the chief: worker 0, which writes files and prints.

        A process that trains without other workers is always the chief.

        Example::

            if strategy.is_chief:
                model.summary()
        """
        job = None if self.replica_set is None else self.replica_set.job
        return job is None or job.is_chief

    @contextlib.contextmanager
    def chief_first(self) -> Generator[None]:
        """Runs a block on the chief first, and then on all other workers at the same time.

        Use this method for work that only one worker needs to do, such as a download into a folder
        that all workers see. All workers must enter the block. Code in the block must not call
        functions that all workers must call together. In a single process the block just runs.

        The chief has ``KERASDIST_MEETING_TIMEOUT`` seconds (600 by default) for the block; after
        that time the job ends.

        Example::

            with strategy.chief_first():
                path = keras.utils.get_file(origin="https://example.com/data.npz")

        Yields:
            Nothing.

        Raises:
            WorkerLostError: On the other workers, if the block failed on the chief.
        """
        job = None if self.replica_set is None else self.replica_set.job
        with contextlib.nullcontext() if job is None else job.chief_first():
            yield

    @cached_property
    def options(self) -> ReplicaOptions:
        """The options of the replicas, such as `batch_norm`."""
        return ReplicaOptions() if self.replica_set is None else self.replica_set.options

    @property
    def runner(self) -> Runner:
        """The object that runs user functions on the devices."""
        return _ALONE if self.replica_set is None else self.replica_set.runner

    @cached_property
    def extended(self) -> StrategyExtended:
        """Further members of the strategy, which mostly libraries use."""
        return StrategyExtended(self)

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that describes the cluster; None for a single process without a cluster."""
        return self._resolver

    @property
    def local_replicas(self) -> range:
        """The numbers of the replicas in this process."""
        return range(1) if self.replica_set is None else self.replica_set.local_replicas

    def scope(self) -> AbstractContextManager[Strategy]:
        """Opens the strategy's scope; models, optimizers and metrics made inside use the strategy.

        Example::

            strategy = kd.MirroredStrategy()
            with strategy.scope():
                model = keras.Sequential([keras.layers.Dense(1)])
                model.compile(optimizer="adam", loss="mse")
            model.fit(x, y, batch_size=256)

        Returns:
            A context manager, which yields the strategy. The same context manager can be entered
            several times, also nested.

        Raises:
            ScopeError: On entering, if another strategy's scope is open in this thread.
        """
        return _Scope(self)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Calls a function once per replica, on the replica's device.

        Inside of the function, `kerasdist.get_replica_context` returns the replica's context.
        ``optimizer.apply`` sums gradients over the replicas. A Keras loss object with a mean
        reduction divides its mean by the number of replicas, so that the sum of the replicas'
        losses is the mean over the global batch.

        Args:
            fn: The function. JAX traces and compiles it, once for each function object and each set
                of shapes of the arguments.
            args: Positional arguments. Each replica gets its component of a distributed value, such
                as a batch of a distributed dataset. Any other argument goes to all replicas
                unchanged.
            kwargs: Keyword arguments, distributed in the same way as `args`.
            options: A `RunOptions` or ``tf.distribute.RunOptions``. These options have no effect,
                except that options for XLA raise an error.

        Returns:
            The structure that the function returns, with a `PerReplica` of all replicas' values at
            each leaf. With one replica, the function's result itself.

        Raises:
            ValueError: If `args` is not a tuple or list.
            TypeError: If `options` has another type.
            UnsupportedError: If `options` has options for XLA.
            ScopeError: In replica context.
        """
        options_of(RunOptions, options, "options")
        if not isinstance(args, list | tuple):
            raise ValueError(
                "Expected args to be a tuple or list of the function's arguments. "
                f"Received: args={args!r:.100} of type {type(args).__name__}. Put a single "
                "argument into a tuple: args=(x,)."
            )
        context.require_cross_replica("run", "call the function directly")
        self.is_used = True
        with self.scope(), self._for_all_workers("run"):
            return self.runner.run(self, fn, Arguments.of(args, kwargs))

    def reduce(
        self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None = None
    ) -> Any:
        """Returns the sum or mean over the replicas; the mean of integers is a float.

        In a job all workers must call this method.

        Args:
            reduce_op: ``"SUM"`` or ``"MEAN"``.
            value: A distributed value, such as `run` returns, or a tensor, which is treated as the
                component of every replica.
            axis: None: the components have equal shapes and are reduced elementwise. An int, or
                several ints: the components are also reduced along these axes, and may differ in
                size along these axes. A mean is then the mean over all elements.

        Returns:
            A tensor; for a nested structure, a tensor at each leaf.

        Raises:
            ScopeError: In replica context.
            ValueError: If the shapes of the components do not fit together, or the components have
                no such axis.
        """
        context.require_cross_replica("reduce", "get_replica_context().all_reduce")
        op = ReduceOp.of(reduce_op)
        with self.scope(), self._for_all_workers("reduce", counts=True):
            return map_leaves(lambda leaf: self.runner.reduce(op, leaf, axis), value)

    def gather(self, value: Any, axis: int) -> Any:
        """Returns the replicas' components, concatenated along an axis.

        In a job all workers must call this method.

        Args:
            value: A distributed value, whose components may differ in size along `axis`, or a
                tensor, which is treated as the component of every replica.
            axis: The axis.

        Returns:
            A tensor; for a nested structure, a tensor at each leaf.

        Raises:
            ScopeError: In replica context.
            ValueError: If the shapes of the components do not fit together, or the components have
                no such axis.
        """
        context.require_cross_replica("gather", "get_replica_context().all_gather")
        with self.scope(), self._for_all_workers("gather", counts=True):
            return map_leaves(lambda leaf: self.runner.gather(leaf, axis), value)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the components of the replicas of this process.

        Args:
            value: A distributed value, a variable, or a structure of distributed values. A tensor
                is treated as the component of each replica.

        Returns:
            A tuple of components, one per replica of this process.
        """
        parts = [self.runner.local_results(leaf) for leaf in flatten(value)]
        count = max(map(len, parts), default=1)
        parts = [part if len(part) == count else part * count for part in parts]
        return tuple(pack(value, column) for column in zip(*parts, strict=True))

    local_results = experimental_local_results

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Calls a function for each replica; returns the results as one distributed value.

        Args:
            value_fn: Called once per replica of this process, with a `ValueContext` that has the
                replica's number.

        Returns:
            A `PerReplica` of the function's results; for nested structures, one at each leaf. With
            one replica, the function's result itself.
        """
        context.require_cross_replica("distribute_values_from_function", "the value itself")
        count = self.num_replicas_in_sync
        values = [value_fn(ValueContext(replica, count)) for replica in self.local_replicas]
        return self.runner.per_replica(values)

    distribute_values_from_function = experimental_distribute_values_from_function

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> Any:
        """Returns a dataset whose batches are divided among the replicas.

        Args:
            dataset: A dataset of global batches: a ``tf.data.Dataset``, ``DataLoader`` or
                ``PyDataset``, or any other object that can be iterated again and again, such as a
                list of batches.
            options: How to distribute the dataset: `InputOptions` or
                ``tf.distribute.InputOptions``.

        Returns:
            A `DistributedDataset`. On TensorFlow with one replica a ``tf.data.Dataset`` is returned
            unchanged.
        """
        context.require_cross_replica("distribute_dataset", "the dataset itself")
        return distributed(dataset, self, options_of(InputOptions, options, "options"))

    distribute_dataset = experimental_distribute_dataset

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        """Returns a distributed dataset whose batches come from datasets that a function makes.

        Args:
            dataset_fn: A function that takes an `InputContext` and returns a dataset. Each batch of
                this dataset goes to a single replica.
            options: How to distribute the dataset: `InputOptions` or
                ``tf.distribute.InputOptions``.

        Returns:
            A `DistributedDataset`. For each step every replica takes a whole batch: from the
            dataset of its worker, or with ``InputReplicationMode.PER_REPLICA`` from a dataset of
            its own.
        """
        context.require_cross_replica("distribute_datasets_from_function", "the dataset itself")
        return from_function(dataset_fn, self, options_of(InputOptions, options, "options"))

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: None = None) -> RowDataset:
        """Returns a dataset of single rows of arrays, which can be shuffled and batched.

        Args:
            numpy_input: Arrays with the examples along axis 0, nested in any structure.
            session: Must be None, because there are no sessions.
        """
        refuse_arguments("experimental_make_numpy_dataset", {"session": session})
        return RowDataset(numpy_input)

    def make_dataset_iterator(self, dataset: Any) -> InputIterator:
        """Returns an iterator over a distributed dataset, as in TensorFlow 1.

        Args:
            dataset: The same as for `experimental_distribute_dataset`.
        """
        return InputIterator(self.distribute_dataset(dataset))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> InputIterator:
        """Returns an iterator over batches from datasets that a function makes, as in TensorFlow 1.

        Args:
            input_fn: The same as for `distribute_datasets_from_function`.
            replication_mode: Whether `input_fn` is called once per worker or once per replica.
        """
        options = InputOptions(experimental_replication_mode=replication_mode)
        return InputIterator(self.distribute_datasets_from_function(input_fn, options))

    def experimental_run(self, fn: Callable[..., Any], input_iterator: Any = None) -> Any:
        """Calls a function once per replica with the next batch, as in TensorFlow 1.

        Args:
            fn: The function.
            input_iterator: An iterator of batches; None if the function takes no batch.
        """
        return self.run(fn, () if input_iterator is None else (input_iterator.get_next(),))

    def group(self, value: Any, name: str | None = None) -> None:
        """Does nothing, because the components of a value are computed without this call.

        Args:
            value: A distributed value.
            name: Has no effect.
        """

    @cached_property
    def sole_replica_context(self) -> ReplicaContext:
        """The context of code that runs once, with the rows of all replicas, as in `fit` on JAX."""
        return ReplicaContext(self, 0, self.num_replicas_in_sync)

    def _for_all_workers(self, call: str, *, counts: bool = False) -> AbstractContextManager[None]:
        """Returns a context that turns errors that a lost worker causes into WorkerLostError.

        With `counts`, the call also counts as one step of the job. `run` leaves `counts` False,
        because the backend itself counts the steps of `run`.
        """
        job = None if self.replica_set is None else self.replica_set.job
        if job is None:
            return contextlib.nullcontext()
        if counts:
            job.step_started()
        return job.translating_failures(call)

    def __str__(self) -> str:
        devices = [] if self.replica_set is None else [str(d) for d in self.replica_set.devices]
        return f"{type(self).__name__}({devices})"

    def __repr__(self) -> str:
        return str(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        # As in tf.distribute, a deep copy of an object shares the strategy that the object holds.
        return self

    def __copy__(self) -> NoReturn:
        raise RuntimeError(
            "Expected no copy of a strategy, which owns devices and threads. Received: "
            "copy.copy(strategy). Use the strategy itself, or make another one."
        )


@final
@dataclass(frozen=True, eq=False)
class _Scope(contextlib.ContextDecorator, AbstractContextManager[Strategy]):
    """The context manager of `Strategy.scope`.

    `entered` has a list per thread: the contexts that the thread has entered and not left yet.
    """

    strategy: Strategy
    entered: threading.local = field(default_factory=threading.local)

    def __enter__(self) -> Strategy:
        replicas = self.strategy.replica_set
        with contextlib.ExitStack() as stack:
            stack.enter_context(context.strategy_scope(self.strategy))
            if replicas is not None:
                stack.enter_context(replicas.placement())
            vars(self.entered).setdefault("stacks", []).append(stack.pop_all())
        return self.strategy

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            weight_files.name_tensor(error)
        self.entered.stacks.pop().__exit__(kind, error, traceback)


@final
class DefaultStrategy(Strategy):
    """Plain Keras: one replica, on the device that Keras chooses."""

    def __init__(self) -> None:
        """Makes a default strategy. Users get the existing one from `kerasdist.get_strategy`."""
        super().__init__(None)

    def __str__(self) -> str:
        return "DefaultStrategy()"


@cache
def _log_untested_versions() -> None:
    """Logs once which installed packages have versions with which kerasdist was not tested."""
    versions = untested(backend_choice().name)
    if versions:
        _logger.info("Not among the releases of docs/versions.md: %s", ", ".join(versions))


def _described(strategy: Strategy, replicas: ReplicaSet) -> str:
    """Returns a line for the log with a strategy's name, replicas, devices and workers."""
    devices = ", ".join(str(device) for device in replicas.devices)
    count = replicas.num_replicas
    said = f"{type(strategy).__name__}: {plural(count, 'replica')}"
    if replicas.job is None:
        return f"{said}, on {devices}"
    place = replicas.job.membership
    return f"{said} of {place.num_workers} workers; worker {place.rank} on {devices}"
