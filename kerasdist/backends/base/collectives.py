"""The interface of collectives, the calls by which one replica's code reaches the others."""

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

# The variables of gradients; None: all that the optimizer was built for.
Variables = list[Any] | None

# Keras's ``optimizer.apply``: takes the optimizer, gradients and variables.
Apply = Callable[[Any, list[Any], Variables], Any]

DEFAULT_COMMUNICATION = CommunicationOptions()


def communication_of(options: object) -> CommunicationOptions:
    """Returns the given options for a collective, the default ones for None."""
    if options is None:
        return DEFAULT_COMMUNICATION
    return options_of(CommunicationOptions, options, "options")


class Collectives(abc.ABC):
    """The collectives of one replica. All replicas must make the same calls in the same order."""

    def differentiated_loss(self, loss: Any, *, is_weighted: bool) -> Any:
        """Returns the loss with which the backward pass is to begin.

        Args:
            loss: The loss, scaled by its optimizer.
            is_weighted: Whether it has been multiplied by the replica's weight before that, so that
                `apply_gradients` does not weight its gradients.
        """
        return loss

    @abc.abstractmethod
    def merge_call(
        self, strategy: StrategyLike, function: Callable[..., Any], given: Arguments
    ) -> Any:
        """Calls a function once, in cross-replica context, with all replicas' arguments.

        All replicas must call it.

        Args:
            strategy: The strategy, the function's first argument.
            function: What to call.
            given: This replica's arguments; the function gets distributed values of them.

        Returns:
            The function's result; of a distributed value, this replica's component.
        """

    def assign(self, variable: keras.Variable, value: Any, write: Callable[[Any, Any], Any]) -> Any:
        """Assigns to a Keras variable in replica code, outside of stateless scopes.

        Args:
            variable: The variable.
            value: A tensor of the variable's type.
            write: Keras's own assignment; takes a variable and a value.
        """
        return write(variable, value)

    @staticmethod
    def own_moments(inputs: Any, axes: Sequence[int]) -> tuple[Any, Any] | None:
        """Returns mean and variance of the replica's own rows by a kernel of the framework.

        One value per channel each; None if there is no such kernel for these rows.
        """
        return None

    def all_moments(self, inputs: Any, axes: Sequence[int]) -> tuple[Any, Any] | None:
        """Returns mean and variance of all replicas' rows, differentiable, by one function.

        All replicas must call it. None on all of them if there is no such function.
        """
        return None

    def equal_writes(self) -> AbstractContextManager[None]:
        """Returns a context in which replicas assign equal values, so that none is communicated."""
        return nullcontext()

    @abc.abstractmethod
    def all_sum(
        self, tensors: Sequence[Any], options: CommunicationOptions = DEFAULT_COMMUNICATION
    ) -> list[Any]:
        """Returns each tensor summed over the replicas; the sums are differentiable.

        The gradient is an all-sum again; in `fit` (contract C1), one weighted by each replica's
        weight (docs/numerics.md). All replicas must call it, with equally many tensors
        of the same shapes and types.

        Args:
            tensors: Tensors of this replica.
            options: How to communicate.
        """

    def summed(self, variables: Sequence[keras.Variable]) -> list[Any]:
        """Returns the sums over the replicas of variables that are sums; in `fit`.

        Unlike with `all_sum`, what an empty replica added in earlier steps counts.
        """
        return self.all_sum([variable.value for variable in variables])

    def mean_of_sum(self, total: Any, replicas: int) -> Any:
        """Returns a sum over the replicas, divided by their number; of integers a float.

        Args:
            total: What `all_sum` returned.
            replicas: How many replicas there are.
        """
        return total / replicas

    @abc.abstractmethod
    def all_gather(self, tensor: Any, axis: int = 0) -> Any:
        """Concatenates the replicas' tensors along an axis; the result is differentiable.

        All replicas must call it; their tensors may differ in size along the axis only.

        Args:
            tensor: A tensor of this replica, of at least one dimension.
            axis: The axis, from 0.
        """

    def all_stack(self, tensor: Any) -> Any:
        """Stacks the replicas' tensors along a new first axis; the result is differentiable.

        All replicas must call it. As the shapes are equal, replicas need not exchange them first.

        Args:
            tensor: A tensor of this replica, of the same shape in all replicas.
        """
        return self.all_gather(tensor[None])

    @abc.abstractmethod
    def apply_gradients(
        self, apply: Apply, optimizer: keras.Optimizer, gradients: list[Any], variables: Variables
    ) -> Any:
        """Sums gradients over the replicas, then updates the variables once, everywhere.

        In `fit` (contract C1), each replica's gradients are multiplied by its weight
        first. All replicas must call it.

        Args:
            apply: Keras's own ``apply``; takes an optimizer, gradients and variables.
            optimizer: A Keras optimizer.
            gradients: This replica's gradients; None for a variable without a gradient.
            variables: The gradients' variables, or None.
        """


@final
class SoleReplica(Collectives):
    """The collectives of a strategy's only replica, and of code that has all replicas' rows."""

    def merge_call(
        self, strategy: StrategyLike, function: Callable[..., Any], given: Arguments
    ) -> Any:
        """Calls the function in cross-replica context, where a value counts once."""
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
        """Returns the tensor itself."""
        return total

    def all_gather(self, tensor: Any, axis: int = 0) -> Any:
        """Returns the tensor itself."""
        return tensor

    def apply_gradients(
        self, apply: Apply, optimizer: keras.Optimizer, gradients: list[Any], variables: Variables
    ) -> Any:
        """Calls Keras's own ``apply``."""
        return apply(optimizer, gradients, variables)
