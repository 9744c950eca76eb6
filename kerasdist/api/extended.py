"""`Strategy.extended`: further members of a strategy, for libraries that use ``tf.distribute``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

from kerasdist.api.options import CommunicationOptions, ReduceOp
from kerasdist.api.values import equal_component
from kerasdist.backends.base.collectives import communication_of
from kerasdist.core import context
from kerasdist.core.context import StrategyLike
from kerasdist.core.earlier_names import EarlierNames
from kerasdist.core.structures import Arguments, map_leaves
from kerasdist.errors import ScopeError


@final
class StrategyExtended(EarlierNames):
    """Further members of a strategy, which libraries use in cross-replica context.

    Example::

        if strategy.extended.should_checkpoint:  # the chief
            print(strategy.extended.worker_devices)

    Attributes:
        experimental_require_static_shapes: Whether every replica must get values of the same
            shapes. It is always False, because no strategy of kerasdist needs that.
        experimental_should_init: Whether this process initializes variables. It is always True: all
            processes initialize variables, and then all workers get the chief's values.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/StrategyExtended
    """

    experimental_require_static_shapes = False
    experimental_should_init = True

    def __init__(self, strategy: StrategyLike) -> None:
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The names of the devices on which this process computes, in the order of its replicas."""
        return self._names_of("devices")

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The names of the devices that hold the variables."""
        return self._names_of("variable_devices")

    def _names_of(self, devices: str) -> tuple[str, ...]:
        return tuple(map(str, getattr(self._strategy.replica_set, devices, ())))

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process is the chief: the worker that writes checkpoints and summaries."""
        return self._strategy.is_chief

    should_save_summary = should_checkpoint

    @property
    def experimental_between_graph(self) -> bool:
        """Whether each worker runs a program of its own, as in a job of several workers."""
        replica_set = self._strategy.replica_set
        return replica_set is not None and replica_set.job is not None

    def non_slot_devices(self, var_list: Any) -> tuple[str, ...]:
        """Returns the devices of optimizer variables that belong to no weight (like `iterations`).

        Args:
            var_list: The optimized variables; this argument has no effect.
        """
        return self.parameter_devices

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Returns the sum or mean of a distributed value's components, on every replica's device.

        Args:
            reduce_op: ``"SUM"`` or ``"MEAN"``.
            value: A distributed value, or a tensor, which is treated as the component of every
                replica.
            destinations: A variable, a distributed value, or a device's name. This argument has no
                effect, because the result goes to every replica's device.
            options: How to communicate.

        Returns:
            A `Mirrored` value; with a single replica, it may be a tensor.

        Raises:
            ScopeError: In replica context.
        """
        [reduced] = self.batch_reduce_to(reduce_op, [(value, destinations)], options)
        return reduced

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Returns the sum or mean of each of several distributed values, on every replica's device.

        Args:
            reduce_op: ``"SUM"`` or ``"MEAN"``.
            value_destination_pairs: Pairs of a value and its destinations, as for `reduce_to`.
            options: How to communicate.

        Raises:
            ScopeError: In replica context.
        """
        context.require_cross_replica("extended.reduce_to", "get_replica_context().all_reduce")
        values = [value for value, _ in value_destination_pairs]
        runner = self._strategy.runner
        return runner.reduce_to(ReduceOp.of(reduce_op), values, communication_of(options))

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Copies a tensor to every replica's device; returns the copies as one distributed value.

        Args:
            tensor: The tensor.
            destinations: The same as for `reduce_to`.

        Raises:
            ScopeError: In replica context.
        """
        context.require_cross_replica("extended.broadcast_to", "get_replica_context().merge_call")
        return self._strategy.runner.broadcast(tensor)

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls ``fn(var, *args, **kwargs)`` once for each copy of a variable, to change the copy.

        Args:
            var: A variable of this strategy.
            fn: A function that takes a copy and may assign to it.
            args: Further arguments. In place of a distributed value, the function gets the
                component that is on the copy's device.
            kwargs: Keyword arguments; distributed values are treated as in `args`.
            group: Whether to return one value for all copies, and not a list with one value per
                copy.

        Raises:
            ScopeError: In replica context, or if the variable does not belong to this strategy.
        """
        context.require_cross_replica("extended.update", "get_replica_context().merge_call")
        if not self.variable_created_in_scope(var):
            raise ScopeError(
                "Expected a variable that was made in this strategy's scope. Received: "
                f"var={var!r:.200}. Make it in `with strategy.scope():`."
            )
        with self._strategy.scope(), context.replaced(context.current, "updates_copies", True):
            results = list(self._strategy.runner.update(var, fn, Arguments.of(args, kwargs)))
        if self._strategy.options.parameter_device is not None:
            results = results[:1]  # all replicas share one copy
        if not group:
            return self._for_each_copy(results[0]) if len(results) == 1 else results
        return results[0] if len(results) == 1 else self._strategy.runner.per_replica(results)

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls ``fn(*args, **kwargs)`` once. If `fn` assigns to a variable, all copies change.

        Args:
            colocate_with: The result of `non_slot_devices`; this argument has no effect.
            fn: The function that assigns.
            args: Arguments of `fn`. A distributed value must be a `Mirrored`; `fn` gets one of its
                components, which are equal.
            kwargs: Keyword arguments, with the same condition as `args`.
            group: Whether to return one value for all devices, and not a list with one value per
                device.
        """
        context.require_cross_replica("extended.update_non_slot", "merge_call")
        with self._strategy.scope():
            result = Arguments(*map_leaves(equal_component, Arguments.of(args, kwargs))).call(fn)
        return result if group else self._for_each_copy(result)

    def _for_each_copy(self, result: object) -> list[object]:
        """Returns a list with `result` once for each copy that this process has of a variable."""
        each = self._strategy.options.devices_per_replica
        return [result] * (len(self.parameter_devices) // each)

    def read_var(self, v: Any) -> Any:
        """Returns the value of a variable as cross-replica code sees it.

        Args:
            v: A variable. If each replica has its own value of the variable, the aggregate of these
                values is returned, such as their sum.
        """
        return self._strategy.runner.read(v)

    def value_container(self, value: Any) -> Any:
        """Returns the value itself, because a Keras variable already holds all of its copies.

        Args:
            value: A variable, or the copy that `update` passed to its function.
        """
        return value

    def variable_created_in_scope(self, v: Any) -> bool:
        """Returns whether a variable was made in this strategy's scope.

        Args:
            v: A variable.
        """
        return self._strategy.runner.created(v)

    def colocate_vars_with(self, colocate_with_variable: Any) -> AbstractContextManager[Any]:
        """Returns a context in which new variables are made on the devices of another variable.

        Args:
            colocate_with_variable: A variable of this strategy, or the result of
                `non_slot_devices`. This argument has no effect, because every variable has a
                copy on each computing device.

        Raises:
            ValueError: If the variable does not belong to this strategy.
        """
        place = colocate_with_variable
        if not (isinstance(place, tuple) or self.variable_created_in_scope(place)):
            raise ValueError(
                "Expected a variable that was made in this strategy's scope. Received: "
                f"colocate_with_variable={place!r:.200}."
            )
        return self._strategy.scope()
