"""The part of the waist that custom loops need: user functions, once a replica."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kerasdist.collectives import CommunicationOptions, ReduceOp
from kerasdist.input.dividing import divided

if TYPE_CHECKING:
    from kerasdist.input.options import InputOptions
    from kerasdist.strategy import Strategy


class Runner(abc.ABC):
    """How user functions run once a replica, and how values cross over (contract C2).

    The meaning of every method is that of the method of ``tf.distribute.Strategy``, or of its
    ``extended``, that it serves. All of them are called in cross-replica context: in a scope, or in
    the function that `ReplicaContext.merge_call` runs.

    Attributes:
        places_ahead: Whether a batch is worth placing while the one before it is used. In the
            memory of the host it is not: there it would only be out of the caches again.
    """

    places_ahead = True

    @abc.abstractmethod
    def run(
        self,
        strategy: Strategy,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls a function once a replica, each with its component of every distributed value.

        Args:
            strategy: The strategy, whose scope is open.
            function: The function; in it `context.replica` is its replica.
            args: Positional arguments.
            kwargs: Keyword arguments.

        Returns:
            What it returns, each leaf a `PerReplica`, or the leaf itself where it is one object in
            all replicas.
        """

    @abc.abstractmethod
    def reduce(self, op: ReduceOp, value: Any, axis: int | None) -> Any:
        """Returns the sum or mean of a distributed value, and along an axis of its components.

        Args:
            op: The operation.
            value: A distributed value, or a tensor that stands for equal components.
            axis: None, or the axis along which components are reduced too; a mean counts elements.
        """

    @abc.abstractmethod
    def gather(self, value: Any, axis: int) -> Any:
        """Returns the components one after another.

        Args:
            value: A distributed value; its components may differ in size along `axis`.
            axis: The axis.
        """

    @abc.abstractmethod
    def reduce_to(
        self, op: ReduceOp, values: Sequence[Any], options: CommunicationOptions
    ) -> list[Any]:
        """Returns the sum or mean of each value, as a `Mirrored` or a tensor.

        Args:
            op: The operation.
            values: Distributed values.
            options: How to communicate.
        """

    @abc.abstractmethod
    def broadcast(self, tensor: Any) -> Any:
        """Returns a tensor as a value with an equal component on every replica.

        Args:
            tensor: The tensor.
        """

    @abc.abstractmethod
    def update(
        self,
        variable: Any,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Sequence[Any]:
        """Calls ``function(variable, *args, **kwargs)`` once for each copy of a variable.

        Args:
            variable: A variable of the strategy.
            function: What to do with it.
            args: Positional arguments; of a distributed value the component of that copy.
            kwargs: Keyword arguments, likewise.

        Returns:
            What it returned for each copy.
        """

    @abc.abstractmethod
    def per_replica(self, values: Sequence[Any]) -> Any:
        """Returns a value with these components, each on its replica's device.

        Args:
            values: One structure of arrays, or of other objects, a replica.
        """

    def divide(self, batch: Any, replicas: int) -> Any:
        """Returns a value whose components are consecutive pieces of a global batch.

        Args:
            batch: Arrays with the examples along axis 0, in any structure.
            replicas: How many pieces.

        Raises:
            InputError: If the arrays differ in their number of examples.
        """
        return self.per_replica(divided(batch, replicas))

    @abc.abstractmethod
    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the components of one value; of anything else a tuple of one.

        Args:
            value: A distributed value, a variable, or anything else.
        """

    @abc.abstractmethod
    def read(self, variable: Any) -> Any:
        """Returns the value of a variable as cross-replica code sees it.

        Args:
            variable: A Keras variable, or the framework's.
        """

    @abc.abstractmethod
    def created(self, variable: Any) -> bool:
        """Returns whether a variable was made in the strategy's scope.

        Args:
            variable: A Keras variable, or the framework's.
        """

    def distribute(self, dataset: Any, options: InputOptions) -> Any | None:
        """Returns the framework's own distributed dataset for one of its own, else None.

        Args:
            dataset: What the user wants distributed.
            options: How.
        """
        del dataset, options
        return None

    def distribute_own(self, dataset: Any, pieces: int, options: InputOptions) -> Any | None:
        """Returns the framework's own distributed dataset of a worker's own batches, else None.

        Args:
            dataset: What this worker reads.
            pieces: In how many each batch is cut; a step takes one for each replica here.
            options: How.
        """
        del dataset, pieces, options
        return None

    def distribute_pipelines(self, pipelines: Sequence[Any], options: InputOptions) -> Any | None:
        """Returns the framework's own dataset of replicas' batches for its own datasets, else None.

        Args:
            pipelines: One for all replicas, or one each.
            options: How.
        """
        del pipelines, options
        return None
