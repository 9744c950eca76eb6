"""The interface of collectives: calls through which the replicas exchange and combine values."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import keras

from kerasdist.api.options import CommunicationOptions, options_of
from kerasdist.api.values import sole_component
from kerasdist.core.context import StrategyLike, default_strategy, replica_scope
from kerasdist.core.structures import Arguments
from kerasdist.keras_compat import ops

# The variables that gradients update; None means all variables of the optimizer.
Variables = list[Any] | None

# Keras's ``optimizer.apply``, which takes the optimizer, gradients and variables.
Apply = Callable[[Any, list[Any], Variables], Any]

DEFAULT_COMMUNICATION = CommunicationOptions()


def communication_of(options: object) -> CommunicationOptions:
    """Returns the options as `CommunicationOptions`; the default options if `options` is None."""
    if options is None:
        return DEFAULT_COMMUNICATION
    return options_of(CommunicationOptions, options, "options")


class Collectives(abc.ABC):
    """The collectives of one replica. All replicas must make the same calls in the same order."""

    def differentiated_loss(self, loss: Any, *, is_weighted: bool) -> Any:
        """Returns the loss from which the backward pass begins.

        Args:
            loss: The loss, which the optimizer has already scaled if it scales losses.
            is_weighted: Whether the loss is already multiplied by the replica's weight, which is
                its fraction of the global batch's rows. If so, `apply_gradients` must not multiply
                the gradients by that weight again.
        """
        return loss

    @abc.abstractmethod
    def merge_call(
        self, strategy: StrategyLike, function: Callable[..., Any], given: Arguments
    ) -> Any:
        """Calls a function once, in cross-replica context, with all replicas' arguments.

        All replicas must call this method.

        Args:
            strategy: The strategy, which is the function's first argument.
            function: The function.
            given: This replica's arguments; the function gets the arguments of all replicas, as
                distributed values.

        Returns:
            The function's result; a distributed value is replaced by this replica's component.
        """

    def assign(self, variable: keras.Variable, value: Any, write: Callable[[Any, Any], Any]) -> Any:
        """Assigns a value to a Keras variable in replica code, outside of Keras's StatelessScope.

        Args:
            variable: The variable.
            value: A tensor of the variable's type.
            write: Keras's own assignment, which takes a variable and a value.
        """
        return write(variable, value)

    @staticmethod
    def own_moments(inputs: Any, axes: Sequence[int]) -> tuple[Any, Any] | None:
        """Returns the mean and variance of each channel of this replica's rows, by a fast kernel.

        Returns None if the framework has no fast kernel for these rows.
        """
        return None

    def all_moments(self, inputs: Any, axes: Sequence[int]) -> tuple[Any, Any] | None:
        """Returns the mean and variance of each channel over the rows of all replicas.

        The result is differentiable. All replicas must call this method. On a backend without an
        implementation of its own, the method returns None on all replicas, and its caller combines
        the replicas' own moments.
        """
        return None

    def equal_writes(self) -> AbstractContextManager[None]:
        """Returns a context for assignments of values that are equal on all replicas.

        Inside of the context the replicas need not exchange the values that they assign.
        """
        return nullcontext()

    @abc.abstractmethod
    def all_sum(
        self, tensors: Sequence[Any], options: CommunicationOptions = DEFAULT_COMMUNICATION
    ) -> list[Any]:
        """Returns each tensor summed over the replicas; the sums are differentiable.

        The gradient of these sums is also summed over the replicas. In `fit`, each replica's
        gradient is first multiplied by the replica's fraction of the global batch
        (docs/numerics.md). All replicas must call this method, with the same number of tensors and
        with the same shapes and types.

        Args:
            tensors: Tensors of this replica.
            options: How to communicate.
        """

    def summed(self, variables: Sequence[keras.Variable]) -> list[Any]:
        """Returns each variable's value summed over the replicas, for the variables of metrics.

        The method is used in `fit`. `all_sum` counts a replica that has no rows in this step as
        zero. This method also counts what such a replica has summed in earlier steps.
        """
        return self.all_sum([variable.value for variable in variables])

    def mean_of_sum(self, total: Any, replicas: int) -> Any:
        """Converts the sum of a value over the replicas to the mean; a mean of integers is a float.

        Args:
            total: The result of `all_sum`.
            replicas: How many replicas there are.
        """
        return total / replicas

    @abc.abstractmethod
    def all_gather(self, tensor: Any, axis: int = 0) -> Any:
        """Concatenates the replicas' tensors along an axis; the result is differentiable.

        All replicas must call this method. The replicas' tensors may differ in size only along the
        axis.

        Args:
            tensor: A tensor of this replica, of at least one dimension.
            axis: The axis, counted from 0.
        """

    def all_stack(self, tensor: Any) -> Any:
        """Stacks the replicas' tensors along a new first axis; the result is differentiable.

        All replicas must call this method. The replicas need not exchange shapes, because the
        shapes must be equal.

        Args:
            tensor: A tensor of this replica, of the same shape on all replicas.
        """
        return self.all_gather(tensor[None])

    def replaced_by_gradients(
        self, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> dict[int, Any]:
        """Returns the next values of variables with ``overwrite_with_gradient``.

        The keys of the result are the indices of these variables in `variables`.

        Float8 scales are such variables: their "gradient" is their next value. The replicas' values
        are not added up: the largest of them is returned. All replicas must call this method.

        Args:
            gradients: This replica's gradients; None for a variable without a gradient.
            variables: The variables of the gradients.
        """
        return {
            index: ops.max(self.all_stack(gradient), axis=0)
            for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=False))
            if gradient is not None and getattr(variable, "overwrite_with_gradient", False)
        }

    @abc.abstractmethod
    def apply_gradients(
        self, apply: Apply, optimizer: keras.Optimizer, gradients: list[Any], variables: Variables
    ) -> Any:
        """Sums gradients over the replicas, then updates the variables once on each replica.

        In `fit` a replica's gradients are first multiplied by its fraction of the global batch. All
        replicas must call this method.

        Args:
            apply: Keras's own ``apply``, which takes an optimizer, gradients and variables.
            optimizer: A Keras optimizer.
            gradients: This replica's gradients; None for a variable without a gradient.
            variables: The variables of the gradients, or None for all of the optimizer's variables.
        """


@final
class SoleReplica(Collectives):
    """The collectives of a strategy's only replica, or of code that has the rows of all replicas.

    In both cases there is nothing to exchange. So the sum of a tensor over the replicas is the
    tensor itself, and so is the concatenation.
    """

    def merge_call(
        self, strategy: StrategyLike, function: Callable[..., Any], given: Arguments
    ) -> Any:
        """Calls the function in cross-replica context, with a strategy of one replica.

        If `strategy` has several replicas, the function gets the default strategy instead.
        """
        if strategy.num_replicas_in_sync > 1:
            strategy = default_strategy()
        with replica_scope(None):
            return sole_component(given.call(function, strategy))

    def all_sum(
        self, tensors: Sequence[Any], options: CommunicationOptions = DEFAULT_COMMUNICATION
    ) -> list[Any]:
        """Returns the tensors themselves."""
        return list(tensors)

    def mean_of_sum(self, total: Any, replicas: int) -> Any:
        """Returns `total` itself, because `all_sum` has added up nothing."""
        return total

    def all_gather(self, tensor: Any, axis: int = 0) -> Any:
        """Returns the tensor itself."""
        return tensor

    def apply_gradients(
        self, apply: Apply, optimizer: keras.Optimizer, gradients: list[Any], variables: Variables
    ) -> Any:
        """Calls Keras's own ``apply``."""
        return apply(optimizer, gradients, variables)
